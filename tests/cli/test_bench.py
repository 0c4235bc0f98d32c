"""`paddock bench` runs what is asked for, one after the other, whatever becomes of each."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from paddock.cli.bench import suites
from paddock.cli.program import program

ROOT = Path(__file__).parents[2]
GOOD = """
print("working")
print('{"bench": "%s", "commit": "abc", "figures": {"one": 1}, "ratios": {}, "missing": {}}')
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with three suites, of which the middle one fails."""
    place = tmp_path / "bench"
    place.mkdir()
    (place / "alpha.py").write_text(GOOD % "alpha")
    (place / "broken.py").write_text('# "bench": nothing\nraise SystemExit("no such kernel")\n')
    (place / "tti.py").write_text(GOOD % "tti")
    shutil.copy(ROOT / "bench" / suites.LEFTOVERS, place)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(suites, "directory", lambda: place)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return place


def run(*arguments: str) -> Result:
    return CliRunner().invoke(program, ["bench", *arguments])


def test_a_suite_that_fails_stops_no_other_and_is_named_at_the_end(checkout: Path) -> None:
    result = run("all")

    assert result.exit_code == 1
    assert "broken (status 1: no such kernel)" in " ".join(result.output.split())
    kept = {path.name: json.loads(path.read_text()) for path in checkout.glob("results/*.json")}
    assert sorted(kept) == ["alpha.json", "tti.json"]
    assert kept["alpha.json"]["figures"] == {"one": 1}


def test_the_time_of_each_and_of_all_is_said(checkout: Path) -> None:
    lines = run("all").output.splitlines()

    start = next(number for number, line in enumerate(lines) if line.startswith("SUITE"))
    named = [line.split()[0] for line in lines[start + 1 : start + 5]]
    assert named == ["tti", "alpha", "broken", "total"]
    assert "2 of 3 measured" in lines[start + 4]


def test_a_failing_suite_keeps_its_earlier_result(checkout: Path) -> None:
    (checkout / "results").mkdir()
    (checkout / "results" / "broken.json").write_text("earlier")

    run("broken")

    assert (checkout / "results" / "broken.json").read_text() == "earlier"


def test_a_suite_that_hangs_is_cut_off(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suites, "SUITE_SECONDS", 0.2)
    (checkout / "broken.py").write_text('# "bench": nothing\nimport time\ntime.sleep(600)\n')

    result = run("broken")

    assert result.exit_code == 1
    assert "took more than 0.2 s" in " ".join(result.output.split())


LEAKS = """
import subprocess, tempfile
tempfile.mkdtemp(prefix="forgotten-")
print(subprocess.Popen(["sleep", "639"], start_new_session=True).pid)
"""


def test_a_suite_that_leaves_something_behind_fails_and_what_it_left_is_named(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suites, "LEFT_SECONDS", 0.2)
    (checkout / "alpha.py").write_text(LEAKS + GOOD % "alpha")

    result = run("alpha")

    pid = int((checkout / "results" / "alpha.log").read_text().split()[0])
    os.kill(pid, signal.SIGKILL)
    said = "".join(result.output.split())
    assert result.exit_code == 1
    assert f"process{pid}sleep639" in said
    assert "/forgotten-" in said
    assert not (checkout / "results" / "alpha.json").exists()


def test_the_temporary_files_of_a_suite_that_leaves_nothing_are_gone(
    checkout: Path, tmp_path: Path
) -> None:
    assert run("alpha").exit_code == 0
    assert not list(tmp_path.glob("pb*"))


WAITING = """
import sys, time
from pathlib import Path
print("working", flush=True)
try:
    time.sleep(600)
except KeyboardInterrupt:
    Path({ended!r}).touch()
# "bench": nothing
"""
BENCH = """
import sys
from pathlib import Path
from paddock.cli import suites
from paddock.cli.program import program
suites.directory = lambda: Path({place!r})
program(["bench", "broken"])
"""


def test_a_bench_that_is_told_to_end_lets_its_suite_clean_up(checkout: Path) -> None:
    ended = checkout / "ended"
    (checkout / "broken.py").write_text(WAITING.format(ended=str(ended)))
    with subprocess.Popen([sys.executable, "-c", BENCH.format(place=str(checkout))]) as process:
        log = checkout / "results" / "broken.log"
        while not (log.exists() and log.read_text()):
            assert process.poll() is None
            time.sleep(0.05)
        process.terminate()
        process.wait(60)

    assert ended.exists()


def test_looks_are_kept_apart_from_results(checkout: Path) -> None:
    run("--quick", "alpha")

    assert (checkout / "results" / "quick" / "alpha.json").exists()
    assert not (checkout / "results" / "alpha.json").exists()


def test_an_unknown_suite_is_answered_with_those_there_are(checkout: Path) -> None:
    result = run("nonsense")

    assert result.exit_code != 0
    assert "all, tti, alpha, broken" in " ".join(result.output.split())
