"""`paddock simulate`: runs the autoscaler on a trace of claims.

A trace is a CSV with the columns `at` and `duration` (seconds) and optionally `count`. It is
replayed in virtual time, so a day takes a moment. The decisions are those of the controller.
"""

import csv
import statistics
from pathlib import Path
from typing import Any

import click
from msgspec import Struct, structs

from paddock.cli.context import with_target
from paddock.cli.output import Output
from paddock.cli.target import CliTarget
from paddock.controllers.env.simulation import (
    Scenario,
    Simulation,
    SimulationResult,
    TraceClaim,
    generated,
    read_trace,
)
from paddock.kit.errors import InvalidError, UnsupportedError
from paddock.resources.kinds.env import Forecast, ScalePolicy, ScalingGroup


class Summary(Struct, frozen=True, kw_only=True):
    """The result of a simulation."""

    claims: int
    served: int
    waited: int
    """Claims that had to wait for a sandbox."""
    wait_median_seconds: float
    wait_p99_seconds: float
    wait_max_seconds: float
    largest_pool: int
    largest_demand: int
    sandbox_hours: float
    """The size of the pool, integrated over time."""
    used_hours: float
    scale_ups: int
    scale_downs: int
    plot: str = ""


@click.command()
@click.argument("trace", required=False, type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--generate", type=click.Choice(["steady", "bursts", "wave"]), help="Generate a trace."
)
@click.option(
    "--seconds",
    type=float,
    default=3600,
    show_default=True,
    help="Set the length of the generated trace.",
)
@click.option(
    "--rate", type=float, default=0.2, show_default=True, help="Set the claims per second."
)
@click.option(
    "--duration",
    type=float,
    default=120,
    show_default=True,
    help="Set the mean duration of a claim in seconds.",
)
@click.option(
    "--seed",
    type=int,
    default=0,
    show_default=True,
    help="Seed the generator; the same seed gives the same trace.",
)
@click.option("--save-trace", type=click.Path(path_type=Path), help="Save the trace as CSV.")
@click.option(
    "--policy",
    type=click.Choice([item.value for item in ScalePolicy]),
    default=ScalePolicy.DEFAULT.value,
    show_default=True,
    help="Set the scaling policy.",
)
@click.option(
    "--min", "minimum", type=int, default=0, show_default=True, help="Set the minimum size."
)
@click.option("--max", "maximum", type=int, help="Set the maximum size.  [default: no limit]")
@click.option(
    "--start-seconds",
    type=float,
    default=0.5,
    show_default=True,
    help="Set how long a sandbox takes to start.",
)
@click.option(
    "--idle-timeout",
    type=int,
    default=300,
    show_default=True,
    help="Scale down after this many idle seconds.",
)
@click.option("--forecast", is_flag=True, help="Derive a minimum size from the recent claim rate.")
@click.option(
    "--plot", type=click.Path(path_type=Path), help="Plot size, demand and waits to this PNG file."
)
@with_target
def simulate(
    target: CliTarget,
    output: Output,
    trace: Path | None,
    generate: str | None,
    seconds: float,
    rate: float,
    duration: float,
    seed: int,
    save_trace: Path | None,
    policy: str,
    minimum: int,
    maximum: int | None,
    start_seconds: float,
    idle_timeout: int,
    forecast: bool,
    plot: Path | None,
) -> None:
    """Replay a trace of claims in virtual time and print how the autoscaler performs."""
    claims = _trace(trace, generate, seconds=seconds, rate=rate, duration=duration, seed=seed)
    if save_trace is not None:
        _save(save_trace, claims)
    scenario = Scenario(
        group=ScalingGroup(
            scale_up_policy=ScalePolicy(policy),
            scale_down_policy=ScalePolicy(policy),
            idle_timeout_seconds=idle_timeout,
            forecast=Forecast(enabled=forecast),
        ),
        minimum=minimum,
        maximum=maximum,
        start_seconds=start_seconds,
        settle_seconds=600,
    )
    outcome = Simulation(scenario, claims).run()
    summary = summarize(outcome, len(claims))
    if plot is not None:
        draw(outcome, plot)
        summary = structs.replace(summary, plot=str(plot))
    output.done(_sentence(summary), summary)


def _trace(
    trace: Path | None,
    generate: str | None,
    *,
    seconds: float,
    rate: float,
    duration: float,
    seed: int,
) -> tuple[TraceClaim, ...]:
    if (trace is None) == (generate is None):
        raise InvalidError("pass either a trace or --generate", hint="see --help")
    if trace is not None:
        if not trace.exists():
            raise InvalidError(f"the file {trace} does not exist")
        return read_trace(trace)
    if rate <= 0 or duration <= 0 or seconds <= 0:
        raise InvalidError("--rate, --duration and --seconds must be greater than 0")
    kind = generate or "steady"
    return generated(kind, seconds=seconds, rate=rate, duration=duration, seed=seed)


def _save(path: Path, claims: tuple[TraceClaim, ...]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("at", "duration"))
        writer.writerows((f"{claim.at:.3f}", f"{claim.duration:.3f}") for claim in claims)


def summarize(outcome: SimulationResult, claims: int) -> Summary:
    """Summarize the outcome."""
    waits = sorted(wait for _, wait in outcome.waits)
    held = used = 0.0
    for before, after in zip(outcome.samples, outcome.samples[1:], strict=False):
        held += before.replicas * (after.at - before.at)
        used += before.running * (after.at - before.at)
    return Summary(
        claims=claims,
        served=len(waits),
        waited=sum(wait > 0 for wait in waits),
        wait_median_seconds=round(statistics.median(waits), 3) if waits else 0.0,
        wait_p99_seconds=round(waits[int(0.99 * (len(waits) - 1))], 3) if waits else 0.0,
        wait_max_seconds=round(waits[-1], 3) if waits else 0.0,
        largest_pool=max((sample.replicas for sample in outcome.samples), default=0),
        largest_demand=max((sample.demand for sample in outcome.samples), default=0),
        sandbox_hours=round(held / 3600, 3),
        used_hours=round(used / 3600, 3),
        scale_ups=sum(step.decision.target > step.before for step in outcome.steps),
        scale_downs=sum(step.decision.target < step.before for step in outcome.steps),
    )


def _sentence(summary: Summary) -> str:
    lines = [
        f"{summary.served} of {summary.claims} claims served, {summary.waited} of them waited",
        (
            f"wait: median {summary.wait_median_seconds:g} s, 99 % within "
            f"{summary.wait_p99_seconds:g} s, longest {summary.wait_max_seconds:g} s"
        ),
        (
            f"largest pool {summary.largest_pool} for a demand of up to {summary.largest_demand}; "
            f"{summary.scale_ups} scale-ups, {summary.scale_downs} scale-downs"
        ),
        f"{summary.sandbox_hours:g} sandbox hours held, {summary.used_hours:g} used",
    ]
    if summary.plot:
        lines.append(f"plotted to {summary.plot}")
    return "\n".join(lines)


def draw(outcome: SimulationResult, path: Path) -> None:
    """Plot pool size, demand and waiting time as PNG."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedError(
            "matplotlib, which draws plots, is not installed",
            hint="pip install matplotlib, or omit --plot",
        ) from error
    figure: Any = Figure(figsize=(11, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    sizes, waits = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    at = [sample.at / 60 for sample in outcome.samples]
    sizes.step(at, [item.replicas for item in outcome.samples], where="post", label="pool size")
    sizes.step(at, [item.demand for item in outcome.samples], where="post", label="demand")
    sizes.step(
        at, [item.running for item in outcome.samples], where="post", label="in use", linewidth=0.8
    )
    sizes.set_ylabel("sandboxes")
    sizes.set_ylim(bottom=0)
    sizes.legend(loc="upper left")
    waits.scatter([at / 60 for at, _ in outcome.waits], [wait for _, wait in outcome.waits], s=6)
    waits.set_ylabel("waited (s)")
    waits.set_xlabel("minutes")
    waits.set_ylim(bottom=0)
    for axes in (sizes, waits):
        axes.grid(alpha=0.3)
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise InvalidError(f"{path} cannot be written: {error.strerror}") from error
