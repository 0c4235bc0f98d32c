"""`paddock bench`: runs the benchmarks one after the other, prints and stores their results.

The benchmarks are the scripts in `bench/`. `suites.py` runs one of them. A suite that fails or
hangs does not stop the others.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import click
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from paddock.cli.bench import suites
from paddock.cli.context import with_target
from paddock.cli.output import Output, notes, screen
from paddock.cli.target import CliTarget
from paddock.kit.errors import NotFoundError, PaddockError

ALL = "all"
SPREAD = ("n", "success", "p50_ms", "p95_ms", "p99_ms", "max_ms")


@click.command()
@click.argument("names", nargs=-1, metavar="[all | SUITE...]")
@click.option("--quick", is_flag=True, help="Run each suite for at most a minute.")
@click.option("--list", "only_list", is_flag=True, help="List the suites.")
@with_target
def bench(
    _target: CliTarget, output: Output, names: tuple[str, ...], quick: bool, only_list: bool
) -> None:
    """Run the benchmarks: all suites, or those named, one after the other.

    Results, logs and plots are stored in bench/results, those of --quick in bench/results/quick.
    `python bench/figures.py --write` puts the stored results into the README. A suite that fails,
    or leaves a process, a mount or a file behind, is listed at the end and keeps its earlier
    result. All suites take about forty minutes on an idle machine.

    Other systems are measured for comparison if they are installed: bubblewrap, crun, podman,
    nginx, HAProxy, Envoy, skopeo, umoci and OpenSandbox's server. `scripts/install-rivals` installs
    them.
    """
    known = suites.suites()
    if only_list:
        rows = ([name, _about(path)] for name, path in known.items())
        output.rows(list(known), ("suite", "what"), rows)
        return
    wanted = [name.replace("_", "-") for name in names]
    if not wanted or wanted == [ALL]:
        wanted = list(known)
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise NotFoundError(
            f"suite {unknown[0]!r} does not exist",
            hint=f"the suites are {', '.join((ALL, *known))}",
        )
    done: list[dict[str, Any]] = []
    took: dict[str, float] = {}
    failed: dict[str, str] = {}
    with _progress() as progress:
        task = progress.add_task("", total=len(wanted), note="")
        for name in wanted:
            progress.update(task, description=name, note="")
            started = time.monotonic()
            try:
                result = suites.run(
                    known[name],
                    quick=quick,
                    on_output=lambda text: progress.update(task, note=text),
                )
            except suites.SuiteFailedError as error:
                failed[name] = str(error)
                continue
            finally:
                took[name] = time.monotonic() - started
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
        where = f"{suites.results_in(quick=quick)}/{known[next(iter(failed))].stem}.log"
        raise PaddockError(
            f"{len(failed)} of {len(took)} failed: "
            + "; ".join(f"{name} ({reason})" for name, reason in failed.items()),
            hint=f"see {where}",
        )


def _about(script: Path) -> str:
    """Return the first line of a script's docstring."""
    return script.read_text().removeprefix('"""').partition("\n")[0]


def _progress() -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f} {task.description}"),
        BarColumn(bar_width=20),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[note]}", markup=True),
        console=notes,
        transient=True,
    )


def _show(result: dict[str, Any], output: Output) -> None:
    """Print a result: series with their spread, then single figures, then ratios."""
    where = _part(result, "machine")
    facts: list[str] = []
    if where:
        facts = [str(result.get("commit")), str(where.get("cpu")), f"{where.get('cores')} cores"]
    screen.print(f"[bold]{result.get('bench')}[/]", *facts)
    how = _part(result, "how")
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
        screen.print(f"  {name:42} {value} {how.get(name, '')}".rstrip(), markup=False)


def _part(result: dict[str, Any], name: str) -> dict[str, Any]:
    return cast("dict[str, Any]", result.get(name) or {})


def _spreads(series: dict[str, dict[str, Any]]) -> Iterator[list[str]]:
    for name, spread in series.items():
        yield [name, *(f"{spread[key]:g}" if key in spread else "-" for key in SPREAD)]
