"""Every benchmark reports in the same format, also what it could not measure."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

sys.path.insert(0, str(ROOT / "bench"))
import floors  # noqa: E402
import reporting  # noqa: E402

sys.path.remove(str(ROOT / "bench"))


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> reporting.Report:
    """A report that writes its plots to a directory of the test."""
    monkeypatch.setattr(sys, "argv", ["sample.py", "--quick"])
    monkeypatch.setattr(reporting, "LOOKS", tmp_path / "looks")
    return reporting.Report("sample", "A sample.")


def finished(report: reporting.Report, capsys: pytest.CaptureFixture[str]) -> tuple[str, dict]:
    report.finish()
    lines = capsys.readouterr().out.splitlines()
    return "\n".join(lines[:-1]), json.loads(lines[-1])


def test_a_series_has_its_percentiles_its_worst_its_number_and_its_success(
    report: reporting.Report, capsys: pytest.CaptureFixture[str]
) -> None:
    report.spread("calls", [number / 1000 for number in range(1, 100)], failed=1)

    table, result = finished(report, capsys)

    assert result["figures"]["calls"] == {
        "n": 100,
        "success": 0.99,
        "p50_ms": 50,
        "p95_ms": 95,
        "p99_ms": 99,
        "max_ms": 99,
    }
    assert table.splitlines()[2].split() == ["series", "n", "success", "p50", "p95", "p99", "max"]


@pytest.mark.parametrize(
    ("count", "share", "rank"),
    [(1, 0.99, 1), (2, 0.5, 1), (3, 0.5, 2), (100, 0.95, 95), (100, 0.99, 99), (101, 0.99, 100)],
)
def test_a_percentile_is_the_sample_of_the_nearest_rank(
    count: int, share: float, rank: int
) -> None:
    assert reporting.at([float(number) for number in range(1, count + 1)], share) == rank


def test_a_failed_attempt_is_reported_and_stops_nothing(
    report: reporting.Report, capsys: pytest.CaptureFixture[str]
) -> None:
    well = []
    for number in range(3):
        with report.trying("a call"):
            well.append(1 / number)
    report.spread("calls", well, failed=3 - len(well))

    assert "a call failed: ZeroDivisionError" in capsys.readouterr().err
    _, result = finished(report, capsys)
    assert (result["figures"]["calls"]["n"], result["figures"]["calls"]["success"]) == (3, 0.6667)


def test_a_series_without_successes_fails_the_suite(report: reporting.Report) -> None:
    report.spread("others", [0.001])
    report.spread("calls", [], failed=3)

    with pytest.raises(SystemExit, match="nothing went well of calls"):
        report.finish()


def test_an_alternative_without_successes_is_reported_missing(
    report: reporting.Report, capsys: pytest.CaptureFixture[str]
) -> None:
    report.spread("ours", [0.001])
    report.spread("theirs", [], failed=3, is_ours=False)

    _, result = finished(report, capsys)

    assert result["missing"] == {"theirs": "all of 3 tries failed"}


def test_a_single_figure_says_what_it_is(
    report: reporting.Report, capsys: pytest.CaptureFixture[str]
) -> None:
    report.figure("rate", 17, "median of 5")
    report.writes("create", 30, 10)

    table, result = finished(report, capsys)

    assert result["how"] == {"rate": "median of 5", "store_writes_per_create": "mean of 10"}
    assert "17 median of 5" in table


def test_a_result_names_the_machine_and_the_commit_on_the_terminal_and_for_programs(
    report: reporting.Report, capsys: pytest.CaptureFixture[str]
) -> None:
    report.writes("create", 30, 10)

    table, result = finished(report, capsys)

    assert result["figures"] == {"store_writes_per_create": 3}
    assert result["commit"] in table
    assert f"{result['machine']['cores']} cores" in table
    assert result["machine"]["kernel"] in table


def test_an_alternative_that_is_not_installed_is_reported_without_a_ratio(
    report: reporting.Report,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(floors, "rootfs", lambda: Path("/"))
    monkeypatch.setattr(floors.shutil, "which", lambda _, path=None: None)
    report.spread("ours", [0.001, 0.002])

    floors.measure(report, 3)
    report.against("ours", floors.ALTERNATIVES)
    table, result = finished(report, capsys)

    assert result["missing"] == dict.fromkeys(
        floors.ALTERNATIVES, "not installed: scripts/install-rivals"
    )
    assert result["ratios"] == {}
    assert table.count("not installed") == len(floors.ALTERNATIVES)


def test_a_plot_is_drawn_also_of_single_figures(
    report: reporting.Report, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    report.figure("ours", 3)
    report.figure("theirs", 2)
    report.against("ours", ["theirs"])

    _, result = finished(report, capsys)

    assert result["ratios"] == {"ours_to_theirs": 1.5}
    assert (tmp_path / "looks" / "sample.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_gives_every_series_and_every_ratio_a_line_of_its_own(
    report: reporting.Report, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    heights: list[int] = []
    for count in (1, 30):
        for number in range(count):
            report.spread(f"calls_{number}", [0.001, 0.002])
            report.against(f"calls_{number}", ["calls_0"])
        finished(report, capsys)
        heights.append(height_of(tmp_path / "looks" / "sample.png"))

    assert heights[1] - heights[0] > 2 * 29 * PIXELS_OF_A_LINE


PIXELS_OF_A_LINE = 15


def height_of(png: Path) -> int:
    return int.from_bytes(png.read_bytes()[20:24])
