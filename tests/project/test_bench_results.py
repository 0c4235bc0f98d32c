"""Kept results are comparable: one machine, one commit, no comparison left out."""

import json
import re
import sys
from datetime import datetime, timedelta
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


MEASURED_APART = {"kubernetes_pods"}
"""Measured on a cluster, by a command of its own."""
DAYS_APART = 7


def kept(path: Path) -> dict[str, Any]:
    """Return a result, whose benchmark gave the kind of each figure."""
    result = json.loads(path.read_text())
    assert "how" in result, "its benchmark did not yet give the kind of each figure: run it anew"
    return result


def mixed(results: dict[str, dict[str, Any]]) -> list[str]:
    """Return what shows that results were not measured together; empty if they were.

    `paddock bench` measures all suites but those of `MEASURED_APART` in one run, so these are of
    one commit: one that was kept from an earlier run would describe other code than the figures
    beside it. The others are of another run, and at most a week older or newer.
    """
    together = {name: item for name, item in results.items() if name not in MEASURED_APART}
    commits = {item["commit"] for item in together.values()}
    found = [f"measured at different commits: {sorted(commits)}"] if len(commits) > 1 else []
    found += [
        f"{name}: {item['commit']!r} is not a commit"
        for name, item in results.items()
        if not re.fullmatch("[0-9a-f]{7,40}", item["commit"])
    ]
    newest = max(datetime.fromisoformat(item["date"]) for item in results.values())
    return found + [
        f"{name}: older than the others by more than {DAYS_APART} days: {item['date']}"
        for name, item in results.items()
        if newest - datetime.fromisoformat(item["date"]) > timedelta(days=DAYS_APART)
    ]


def is_excused(name: str, reason: str) -> bool:
    return any(
        re.fullmatch(pattern, name) and re.match(why, reason)
        for pattern, why in MAY_BE_MISSING.items()
    )


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_kept_result_omits_only_what_is_unavailable(path: Path) -> None:
    missing = kept(path).get("missing", {})
    assert [name for name, reason in missing.items() if not is_excused(name, reason)] == []


def test_kept_results_were_measured_together() -> None:
    assert mixed({path.stem: kept(path) for path in RESULTS}) == []


def test_a_result_of_an_earlier_run_is_found() -> None:
    date = "2026-11-19T02:00:00+00:00"
    result = {"date": date, "commit": "297ca46"}
    pods = {"date": "2026-11-13T02:00:00+00:00", "commit": "3c37bf8"}
    assert mixed({"claim": result, "cold": result, "kubernetes_pods": pods}) == []
    earlier = {"date": date, "commit": "3c37bf8"}
    assert mixed({"claim": result, "cold": earlier}) == [
        "measured at different commits: ['297ca46', '3c37bf8']"
    ]
    [problem] = mixed({"claim": result, "kubernetes_pods": pods | {"date": "2026-11-11T00:00Z"}})
    assert "kubernetes_pods: older than the others" in problem
    [problem] = mixed({"claim": result | {"commit": ""}})
    assert "is not a commit" in problem


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
