"""Runs one suite of benchmarks: finds its script, bounds its time, keeps its result.

Each runs in a process of its own, with a directory of its own for temporary files. That directory's
name is in the environment of whatever the suite starts, so that afterwards
`bench/leftovers.py` can tell what it has left behind: then it has failed.
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
"""What callers notice, measured through the front door; the others are parts of it."""
PARTS = ("reporting", "floors")
LEFTOVERS = "leftovers.py"
"""Says what a suite has left on the machine; it needs the tests, which are no part of this."""
SUITE_SECONDS = 900
"""A suite that takes longer hangs."""
LEFT_SECONDS = 60.0
"""For the kernel to finish with what a suite has let go."""


def directory() -> Path:
    """Find the scripts: they come with a checkout, not with the installed package."""
    for parent in Path(__file__).resolve().parents:
        if (parent / "bench").is_dir() and (parent / "pyproject.toml").exists():
            return parent / "bench"
    raise NotFoundError("the benchmarks are not here", hint="run this in a checkout of Paddock")


def suites() -> dict[str, Path]:
    """Give every script that ends with a result; others there are parts of these."""
    found: dict[str, Path] = {}
    for path in sorted(directory().glob("*.py")):
        text = path.read_text()
        if path.stem not in PARTS and ('"bench":' in text or "Report(" in text):
            found[path.stem.replace("_", "-")] = path
    return {name: found.pop(name) for name in FIRST if name in found} | found


class SuiteFailedError(Exception):
    """A suite ended without a result, or left something behind; says which."""


def results_in(*, quick: bool) -> Path:
    """Where results go: a look is not what the project says of itself."""
    results = directory() / "results"
    return results / "quick" if quick else results


def run(script: Path, *, quick: bool, said: Callable[[str], None]) -> dict[str, Any]:
    """Run a suite, look at what it left behind, and keep its result if that is nothing."""
    results = results_in(quick=quick)
    results.mkdir(parents=True, exist_ok=True)
    # Some use pieces of the tests, which lie beside the scripts.
    path = os.pathsep.join(
        filter(None, (str(script.parent.parent), os.environ.get("PYTHONPATH", "")))
    )
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": path}
    place = tempfile.mkdtemp(prefix="pb")
    Path(place).chmod(0o1777)  # Servers that are no longer root read files there.
    problems: list[str] = []
    result: dict[str, Any] = {}
    try:
        result = _result_of(script, environment | {"TMPDIR": place}, quick=quick, said=said)
    except SuiteFailedError as error:
        problems.append(str(error))
    finally:
        said("what is left behind?")
        left = _left(script.parent / LEFTOVERS, place, environment, is_well=bool(result))
    if left:
        problems.append(f"it left behind {'; '.join(left)}")
    if problems:
        raise SuiteFailedError("; ".join(problems))
    kept = results / f"{script.stem}.json"
    kept.write_bytes(msgspec.json.encode(result) + b"\n")
    if "commit" not in result:
        # It says neither where nor what was measured, and draws nothing.
        reporting = [sys.executable, str(script.parent / "reporting.py"), str(kept)]
        told = subprocess.run(reporting, stdout=subprocess.PIPE, check=True)
        result |= msgspec.json.decode(told.stdout) | {"quick": quick}
        kept.write_bytes(msgspec.json.encode(result) + b"\n")
    return result


def _result_of(
    script: Path, environment: dict[str, str], *, quick: bool, said: Callable[[str], None]
) -> dict[str, Any]:
    knows_quick = "--quick" in script.read_text() or "Report(" in script.read_text()
    command = [sys.executable, str(script), *(["--quick"] if quick and knows_quick else [])]
    last, words = "", ""
    with (
        (results_in(quick=quick) / f"{script.stem}.log").open("w") as log,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        ) as process,
        _bounded(process) as cut_off,
    ):
        for line in _lines(process):
            log.write(f"{line}\n")
            log.flush()
            if line.startswith('{"bench"'):
                last = line
            elif line.strip():
                words = line.strip()
                said(words[:70].replace("[", "("))
    if cut_off.is_set():
        raise SuiteFailedError(f"it took more than {SUITE_SECONDS} s")
    if process.returncode or not last:
        raise SuiteFailedError(f"status {process.returncode}: {words[:200]}")
    return msgspec.json.decode(last)


def _lines(process: subprocess.Popen[bytes]) -> Generator[str]:
    """Give what a suite says until it ends: what it leaves behind may hold the pipe open."""
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


def _left(script: Path, place: str, environment: dict[str, str], *, is_well: bool) -> list[str]:
    """Name what a suite has left behind; one that failed need not be waited for."""
    seconds = LEFT_SECONDS if is_well else LEFT_SECONDS / 10
    look = [sys.executable, str(script), place, str(seconds)]
    done = subprocess.run(look, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.splitlines()


@contextlib.contextmanager
def _bounded(process: subprocess.Popen[bytes]) -> Generator[threading.Event]:
    """End a suite that takes too long, and one that nobody waits for any more."""
    cut_off = threading.Event()

    def end() -> None:
        cut_off.set()
        _end(process)

    timer = threading.Timer(SUITE_SECONDS, end)
    timer.start()
    # Who is told to end takes the suite along: it is in a session of its own.
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        yield cut_off
    except BaseException:
        _end(process)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
        timer.cancel()


def _leave(number: int, _: object) -> None:
    raise SystemExit(128 + number)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Let a suite clean up after itself, then end what is left of it."""
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(60)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
