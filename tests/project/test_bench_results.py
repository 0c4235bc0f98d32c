"""The results that are kept can be set side by side: one machine, nothing compared left out."""

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
MAY_BE_MISSING = {
    "bwrap_pause": "it has no pause",
    r"burst_\d+_pool_\d+_cold_total": "none: the pool was filled fast enough",
}
"""What a result need not have, and the only reason that is one; both are patterns."""


def kept(path: Path) -> dict[str, Any]:
    """Give a result, if it was made by benchmarks that say of each figure what it is."""
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
def test_a_kept_result_leaves_out_only_what_cannot_be_had(path: Path) -> None:
    missing = kept(path).get("missing", {})
    assert [name for name, reason in missing.items() if not is_excused(name, reason)] == []


def test_all_rows_of_the_readme_are_of_one_machine() -> None:
    machines = {
        (result["machine"]["cpu"], result["machine"]["cores"])
        for row in figures.ROWS
        if (result := figures.result_of(row.suite)) is not None
    }
    assert len(machines) == 1, machines


@pytest.mark.parametrize("row", figures.ROWS, ids=lambda row: f"{row.suite}-{row.figure}")
def test_a_row_has_the_number_of_its_samples_or_says_what_it_is(row: figures.Row) -> None:
    result = kept(figures.RESULTS / f"{row.suite}.json")
    value = result["figures"][row.figure]
    assert isinstance(value, dict) or result["how"].get(row.figure)


@pytest.mark.parametrize("row", figures.ROWS, ids=lambda row: f"{row.suite}-{row.figure}")
def test_a_row_has_every_ratio_that_it_shall_tell(row: figures.Row) -> None:
    ratios = kept(figures.RESULTS / f"{row.suite}.json")["ratios"]
    assert [name for name, _ in row.beside if name not in ratios] == []
