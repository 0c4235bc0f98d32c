"""Every figure that the README states comes from a kept result, and names the script behind it."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()

sys.path.insert(0, str(ROOT / "bench"))
import figures  # noqa: E402

sys.path.remove(str(ROOT / "bench"))

UNIT = re.compile(r"\d\s?(ms|µs|us|MB/s|GB/s|rps|requests/s|per second)\b")


def test_the_readme_says_what_the_results_say() -> None:
    assert figures.written(README) == README, "run `python bench/figures.py --write`"


def test_no_figure_stands_outside_the_table() -> None:
    before, _, rest = README.partition(figures.BEGIN)
    _, end, after = rest.partition(figures.END)
    assert end, "the README has no place for figures"
    stray = [line for line in (before + after).splitlines() if UNIT.search(line)]
    assert not [line for line in stray if "bench/" not in line], stray


@pytest.mark.parametrize("row", figures.ROWS, ids=lambda row: f"{row.suite}-{row.figure}")
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


def test_links_of_the_readme_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if "://" not in target:
            assert (ROOT / target).exists(), f"{target} is not there"
