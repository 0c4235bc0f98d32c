"""Kept results are comparable: one machine, no comparison left out."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

sys.path.insert(0, str(ROOT / "bench"))
import figures  # noqa: E402

sys.path.remove(str(ROOT / "bench"))

RESULTS = sorted(figures.RESULTS.glob("*.json"))
ROWS = (*figures.ROWS, *figures.POD_ROWS)
MAY_BE_MISSING = {
    "bwrap_pause": "it has no pause",
    r"burst_\d+_pool_\d+_cold_total": "none: the pool was filled fast enough",
}
"""What a result may omit, and the only valid reason; both are patterns."""


def kept(path: Path) -> dict[str, Any]:
    """Return a result, if its benchmarks give the kind of each figure."""
    result = json.loads(path.read_text())
    if "how" not in result:
        pytest.skip("made before single figures said what they are: `paddock bench` makes it anew")
    return result


def is_excused(name: str, reason: str) -> bool:
    return any(
        re.fullmatch(pattern, name) and re.match(why, reason)
        for pattern, why in MAY_BE_MISSING.items()
    )


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_kept_result_omits_only_what_is_unavailable(path: Path) -> None:
    missing = kept(path).get("missing", {})
    assert [name for name, reason in missing.items() if not is_excused(name, reason)] == []


@pytest.mark.parametrize("page", figures.PAGES, ids=lambda page: page.path)
def test_all_rows_of_a_page_are_of_one_machine(page: figures.Page) -> None:
    machines = {
        (result["machine"]["cpu"], result["machine"]["cores"])
        for row in page.rows
        if (result := figures.result_of(row.suite)) is not None
    }
    assert len(machines) == 1, machines


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.suite}-{row.figure}")
def test_a_row_has_its_sample_count_or_its_kind(row: figures.Row) -> None:
    result = kept(figures.RESULTS / f"{row.suite}.json")
    value = result["figures"][row.figure]
    assert isinstance(value, dict) or result["how"].get(row.figure)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.suite}-{row.figure}")
def test_a_row_has_all_its_ratios(row: figures.Row) -> None:
    ratios = kept(figures.RESULTS / f"{row.suite}.json")["ratios"]
    assert [name for name, _ in row.beside if name not in ratios] == []
