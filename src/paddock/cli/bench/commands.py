"""`paddock bench`: the project's benchmarks, run one after the other, shown and kept.

What is measured, and how, is in the scripts of `bench/`; one that fails or hangs stops no other.
How one is run is in `suites`.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import click
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from paddock.cli.bench import suites
from paddock.cli.context import with_place
from paddock.cli.output import Output, notes, screen
from paddock.cli.target import Place
from paddock.kit.errors import NotFoundError, PaddockError

ALL = "all"
SPREAD = ("n", "success", "p50_ms", "p95_ms", "p99_ms", "max_ms")


@click.command()
@click.argument("names", nargs=-1, metavar="[all | SUITE...]")
@click.option("--quick", is_flag=True, help="At most a minute each, for a look.")
@click.option("--list", "only_list", is_flag=True, help="Say which there are.")
@with_place
def bench(
    _place: Place, output: Output, names: tuple[str, ...], quick: bool, only_list: bool
) -> None:
    """Measure: all suites, or those named, one after the other.

    Results, logs and plots are kept in bench/results, those of quick looks in
    bench/results/quick; `python bench/figures.py --write` puts the kept ones into the README. A
    suite that fails, or leaves a process, a mount or a file behind, is named at the end, and keeps
    its earlier result. All of them together take some forty minutes on a quiet machine.

    What is installed is measured beside it: bubblewrap, crun, podman, nginx, HAProxy, Envoy and
    OpenSandbox's server. `scripts/install-rivals` installs all of them.
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
                result = suites.run(
                    known[name], quick=quick, said=lambda text: progress.update(task, said=text)
                )
            except suites.SuiteFailedError as error:
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
        where = f"{suites.results_in(quick=quick)}/{known[next(iter(failed))].stem}.log"
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


def _show(result: dict[str, Any], output: Output) -> None:
    """Show a result: series with their spread, then single figures, then ratios."""
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
