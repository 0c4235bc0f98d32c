"""Every measured figure names its script; the figures of tables come from kept results.

Measured figures are told from settings by their format: limits and settings are in whole seconds
and powers of two (KiB, MiB). Not checked are decisions (`docs/decisions`), which report what was
measured at their time, and guarantees, whose bounds have a test each.
"""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()

sys.path.insert(0, str(ROOT / "bench"))
import figures  # noqa: E402

sys.path.remove(str(ROOT / "bench"))

PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in sorted(
        (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/how-to/*.md"))
    )
    if path.name != "guarantees.md"
}
NUMBER = r"\d[\d.,]*\s?"
MEASURED = re.compile(
    rf"{NUMBER}(ms|µs|us|[kKMG]B(/s)?|rps|requests/s|per second|a second)\b"
    rf"|\d\.\d+\s?s\b"
    rf"|\b(takes?|took|costs?|back|ready)( \w+){{0,2}}? ({NUMBER}|an? |two |few )(s|seconds?)\b"
)


def figures_without_a_script(text: str) -> list[str]:
    """Paragraphs and table rows with a measured figure but without its script."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    parts = [" ".join(part.split()) for part in re.split(r"\n\s*\n|\n(?=\|)|\n(?=- )", prose)]
    return [
        part for part in parts if MEASURED.search(part) and not re.search(r"bench/\w+\.py", part)
    ]


@pytest.mark.parametrize("page", figures.PAGES, ids=lambda page: page.path)
def test_a_page_matches_the_results(page: figures.Page) -> None:
    text = (ROOT / page.path).read_text()
    assert figures.END in text, "the page has no place for figures"
    assert figures.written(text, page) == text, "run `python bench/figures.py --write`"


@pytest.mark.parametrize("page", PAGES)
def test_every_figure_names_its_script(page: str) -> None:
    text = PAGES[page]
    if page == "README.md":
        before, _, rest = text.partition(figures.BEGIN)
        _, end, after = rest.partition(figures.END)
        assert end, "the README has no place for figures"
        text = before + after
    assert not figures_without_a_script(text)


@pytest.mark.parametrize(
    "text",
    [
        "A claim takes 12 ms.",
        "An idle one takes\n3 MB and no more.",
        "| fork | 0.7 s |",
        "58,408 requests/s on one core",
        "It is back in a second or two.",
        "A start takes about 4 s.",
    ],
)
def test_measured_figures_are_detected(text: str) -> None:
    assert figures_without_a_script(f"Before.\n\n{text}\n\nSee bench/store.py.")
    assert not figures_without_a_script(f"{text} [claim.py](bench/claim.py)")


@pytest.mark.parametrize(
    "text",
    [
        "| head | 64 KiB, 128 lines (431); 30 s from its first byte (408) |",
        "`wake_timeout_seconds` (60); it is announced 10 s ahead, and 32 MiB are held",
        "```console\n$ podman run: 12 ms\n```",
    ],
)
def test_limits_settings_and_examples_are_no_measurements(text: str) -> None:
    assert not figures_without_a_script(text)


@pytest.mark.parametrize(
    "row", [*figures.ROWS, *figures.POD_ROWS], ids=lambda row: f"{row.suite}-{row.figure}"
)
def test_a_row_is_made_by_a_script_that_measures_it(row: figures.Row) -> None:
    assert (ROOT / "bench" / f"{row.suite}.py").exists()
    result = figures.result_of(row.suite)
    if result is not None:
        said = {**result["figures"], **result.get("missing", {})}
        assert row.figure in said, f"{row.suite} no longer has {row.figure}"


SUITES = "tti claim cold pause_wake hibernate_fork density gateway batch store scale"


@pytest.mark.parametrize("suite", SUITES.split())
def test_every_suite_has_a_figure_in_the_table(suite: str) -> None:
    assert suite in {row.suite for row in figures.ROWS}


def test_links_of_the_readme_have_targets() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if "://" not in target:
            assert (ROOT / target).exists(), f"{target} is not there"
