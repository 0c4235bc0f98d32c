"""Runs one suite of benchmarks: finds its script, limits its time, stores its result.

Each suite runs in its own process with its own temporary directory. The name of that directory is
in the environment of all processes that the suite starts, so that `bench/leftovers.py` can find
what it leaves behind. A suite that leaves anything behind has failed.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import msgspec

from paddock.cli.termination import exit_on_signals
from paddock.kit.errors import NotFoundError

FIRST = (
    "tti",
    "claim",
    "cold",
    "pause-wake",
    "hibernate-fork",
    "density",
    "gateway",
    "batch",
    "store",
    "scale",
)
"""Suites that measure through the public API; the others measure components."""
PARTS = ("reporting", "floors")
LEFTOVERS = "leftovers.py"
"""Lists what a suite has left on the machine; a script, because it imports the tests."""
SUITE_SECONDS = 900
"""A suite that takes longer is killed."""
LEFT_SECONDS = 60.0
"""Time for the kernel to free what a suite has released."""


def directory() -> Path:
    """Return the directory of the scripts, which only a checkout has."""
    for parent in Path(__file__).resolve().parents:
        if (parent / "bench").is_dir() and (parent / "pyproject.toml").exists():
            return parent / "bench"
    raise NotFoundError(
        "the benchmarks are not installed", hint="run this in a checkout of Paddock"
    )


def suites() -> dict[str, Path]:
    """Return every script that prints a result, by name; the others are libraries."""
    found: dict[str, Path] = {}
    for path in sorted(directory().glob("*.py")):
        text = path.read_text()
        if path.stem not in PARTS and ('"bench":' in text or "Report(" in text):
            found[path.stem.replace("_", "-")] = path
    return {name: found.pop(name) for name in FIRST if name in found} | found


class SuiteFailedError(Exception):
    """A suite ended without a result, or left something behind."""


def results_in(*, quick: bool) -> Path:
    """Return the directory of results; quick results are stored separately."""
    results = directory() / "results"
    return results / "quick" if quick else results


def run(script: Path, *, quick: bool, on_output: Callable[[str], None]) -> dict[str, Any]:
    """Run a suite; store its result if it leaves nothing behind."""
    results = results_in(quick=quick)
    results.mkdir(parents=True, exist_ok=True)
    # Some import helpers of the tests, next to the scripts.
    path = os.pathsep.join(
        filter(None, (str(script.parent.parent), os.environ.get("PYTHONPATH", "")))
    )
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": path}
    scratch = tempfile.mkdtemp(prefix="pb")
    Path(scratch).chmod(0o1777)  # Servers that have dropped root read files there.
    problems: list[str] = []
    result: dict[str, Any] = {}
    try:
        result = _result_of(
            script, environment | {"TMPDIR": scratch}, quick=quick, on_output=on_output
        )
    except SuiteFailedError as error:
        problems.append(str(error))
    finally:
        on_output("checking for leftovers")
        left = _left(script.parent / LEFTOVERS, scratch, environment, has_succeeded=bool(result))
    if left:
        problems.append(f"left behind {'; '.join(left)}")
    if problems:
        raise SuiteFailedError("; ".join(problems))
    kept = results / f"{script.stem}.json"
    kept.write_bytes(msgspec.json.encode(result) + b"\n")
    if "commit" not in result:
        # Add the machine and the commit, and draw the plot, which the script does not do.
        reporting = [sys.executable, str(script.parent / "reporting.py"), str(kept)]
        reported = subprocess.run(reporting, stdout=subprocess.PIPE, check=True)
        result |= msgspec.json.decode(reported.stdout) | {"quick": quick}
        kept.write_bytes(msgspec.json.encode(result) + b"\n")
    return result


def _result_of(
    script: Path, environment: dict[str, str], *, quick: bool, on_output: Callable[[str], None]
) -> dict[str, Any]:
    has_quick = "--quick" in script.read_text() or "Report(" in script.read_text()
    command = [sys.executable, str(script), *(["--quick"] if quick and has_quick else [])]
    result, last_line = "", ""
    with (
        (results_in(quick=quick) / f"{script.stem}.log").open("w") as log,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        ) as process,
        _bounded(process) as timed_out,
    ):
        for line in _lines(process):
            log.write(f"{line}\n")
            log.flush()
            if line.startswith('{"bench"'):
                result = line
            elif line.strip():
                last_line = line.strip()
                on_output(last_line[:70].replace("[", "("))
    if timed_out.is_set():
        raise SuiteFailedError(f"took more than {SUITE_SECONDS} s")
    if process.returncode or not result:
        raise SuiteFailedError(f"status {process.returncode}: {last_line[:200]}")
    return msgspec.json.decode(result)


def _lines(process: subprocess.Popen[bytes]) -> Generator[str]:
    """Yield the output of a suite until it ends, even if a leftover process holds the pipe."""
    rest = b""
    while (pipe := process.stdout) is not None:
        is_over = process.poll() is not None
        has_more, _, _ = select.select([pipe], [], [], 0 if is_over else 0.2)
        data = os.read(pipe.fileno(), 1 << 16) if has_more else b""
        if not data and (has_more or is_over):
            break
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace")
    if rest:
        yield rest.decode(errors="replace")


def _left(
    script: Path, scratch: str, environment: dict[str, str], *, has_succeeded: bool
) -> list[str]:
    """List what a suite has left behind; wait less for one that failed."""
    seconds = LEFT_SECONDS if has_succeeded else LEFT_SECONDS / 10
    look = [sys.executable, str(script), scratch, str(seconds)]
    done = subprocess.run(look, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.splitlines()


@contextlib.contextmanager
def _bounded(process: subprocess.Popen[bytes]) -> Generator[threading.Event]:
    """End a suite that takes too long, or when this process is interrupted."""
    timed_out = threading.Event()

    def end() -> None:
        timed_out.set()
        _end(process)

    timer = threading.Timer(SUITE_SECONDS, end)
    timer.start()
    try:
        # A signal to this process must end the suite, too: it has its own session.
        with exit_on_signals():
            yield timed_out
    except BaseException:
        _end(process)
        raise
    finally:
        timer.cancel()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a suite so that it cleans up, then kill its session."""
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(60)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
