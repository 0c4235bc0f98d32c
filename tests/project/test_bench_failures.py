"""Failures during a measurement are counted, in the right series."""

import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

sys.path.insert(0, str(ROOT / "bench"))
import floors  # noqa: E402
import gateway_load  # noqa: E402
import reporting  # noqa: E402
import tti  # noqa: E402

sys.path.remove(str(ROOT / "bench"))


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> reporting.Report:
    monkeypatch.setattr(sys, "argv", ["sample.py", "--quick"])
    return reporting.Report("sample")


def test_a_failure_counts_in_the_tier_of_its_sandbox() -> None:
    tried = [
        {"ok": True, "id": "a", "is_cold": False, "total": 1},
        {"ok": False, "id": "b", "is_cold": True},
        {"ok": True, "id": "c", "is_cold": True, "total": 2},
    ]

    assert tti.of_tier(tried, is_cold=False) == ([tried[0]], 0)
    assert tti.of_tier(tried, is_cold=True) == ([tried[2]], 1)


def test_a_failure_without_a_sandbox_counts_in_every_tier_that_there_is() -> None:
    warm = {"ok": True, "id": "a", "is_cold": False, "total": 1}
    cold = {"ok": True, "id": "b", "is_cold": True, "total": 2}
    nowhere = {"ok": False, "is_cold": False}

    assert tti.of_tier([warm, nowhere], is_cold=False) == ([warm], 1)
    assert tti.of_tier([warm, nowhere], is_cold=True) == ([], 0)
    assert tti.of_tier([warm, cold, nowhere], is_cold=True) == ([cold], 1)


def a_slice(*, answers: int, refused: int = 0, lost: int = 0) -> gateway_load.Slice:
    micros = Counter({1000: answers - 1, 9000: 1} if answers else {})
    return gateway_load.Slice(2.0, answers, refused, lost, 0, micros)


def test_refused_and_lost_requests_count_neither_as_success_nor_as_throughput(
    report: reporting.Report,
) -> None:
    slices = [a_slice(answers=50, refused=10), a_slice(answers=40, lost=10)]

    gateway_load.take(report, "calls", slices, is_ours=True)

    assert report.figures["calls"] == {
        "n": 100,
        "success": 0.8,
        "p50_ms": 1,
        "p95_ms": 1,
        "p99_ms": 9,
        "max_ms": 9,
    }
    assert [one.rps for one in slices] == [20, 20]


def test_a_proxy_that_never_answers_is_missing(report: reporting.Report) -> None:
    gateway_load.take(report, "theirs", [a_slice(answers=0, lost=8)], is_ours=False)

    assert report.missing == {"theirs": "all of 8 tries failed"}


def test_one_start_of_an_alternative_that_fails_is_counted_and_the_rest_is_measured(
    report: reporting.Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = iter([0.1, 0.1, floors.AbsentError("it does not run here: busy"), 0.3])

    def hello(_: floors.Command) -> float:
        turn = next(turns)
        if isinstance(turn, Exception):
            raise turn
        return turn

    monkeypatch.setattr(floors, "hello", hello)
    monkeypatch.setattr(floors, "ALTERNATIVES", {"podman": (floors.bwrap, 1.0)})
    monkeypatch.setattr(floors, "image", lambda _: Path("/"))

    floors.measure(report, 3)

    assert report.figures["podman"] == reporting.spread([0.1, 0.3], failed=1)
