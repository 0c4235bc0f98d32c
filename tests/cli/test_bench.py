"""`paddock bench` runs suites one after the other, also after a failure."""

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
    """A checkout with three suites; the middle one fails."""
    bench = tmp_path / "bench"
    bench.mkdir()
    (bench / "alpha.py").write_text(GOOD % "alpha")
    (bench / "broken.py").write_text('# "bench": nothing\nraise SystemExit("no such kernel")\n')
    (bench / "tti.py").write_text(GOOD % "tti")
    shutil.copy(ROOT / "bench" / suites.LEFTOVERS, bench)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(suites, "directory", lambda: bench)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return bench


def run(*arguments: str) -> Result:
    return CliRunner().invoke(program, ["bench", *arguments])


def test_a_failed_suite_does_not_stop_others_and_is_listed_at_the_end(checkout: Path) -> None:
    result = run("all")

    assert result.exit_code == 1
    assert "broken (status 1: no such kernel)" in " ".join(result.output.split())
    kept = {path.name: json.loads(path.read_text()) for path in checkout.glob("results/*.json")}
    assert sorted(kept) == ["alpha.json", "tti.json"]
    assert kept["alpha.json"]["figures"] == {"one": 1}


def test_the_time_of_each_suite_and_the_total_are_printed(checkout: Path) -> None:
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


def test_a_hanging_suite_is_ended(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_suite_that_leaves_something_behind_fails_and_the_leftovers_are_listed(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suites, "LEFT_SECONDS", 0.2)
    (checkout / "alpha.py").write_text(LEAKS + GOOD % "alpha")

    result = run("alpha")

    pid = int((checkout / "results" / "alpha.log").read_text().split()[0])
    os.kill(pid, signal.SIGKILL)
    output = "".join(result.output.split())
    assert result.exit_code == 1
    assert f"process{pid}sleep639" in output
    assert "/forgotten-" in output
    assert not (checkout / "results" / "alpha.json").exists()


def test_the_temporary_directory_of_a_clean_suite_is_removed(
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
from paddock.cli.bench import suites
from paddock.cli.program import program
suites.directory = lambda: Path({bench!r})
program(["bench", "broken"])
"""


def test_a_terminated_bench_lets_its_suite_clean_up(checkout: Path) -> None:
    ended = checkout / "ended"
    (checkout / "broken.py").write_text(WAITING.format(ended=str(ended)))
    with subprocess.Popen([sys.executable, "-c", BENCH.format(bench=str(checkout))]) as process:
        log = checkout / "results" / "broken.log"
        while not (log.exists() and log.read_text()):
            assert process.poll() is None
            time.sleep(0.05)
        process.terminate()
        process.wait(60)

    assert ended.exists()


def test_quick_results_are_stored_separately(checkout: Path) -> None:
    run("--quick", "alpha")

    assert (checkout / "results" / "quick" / "alpha.json").exists()
    assert not (checkout / "results" / "alpha.json").exists()


def test_an_unknown_suite_is_refused_with_the_list_of_suites(checkout: Path) -> None:
    result = run("nonsense")

    assert result.exit_code != 0
    assert "all, tti, alpha, broken" in " ".join(result.output.split())
