"""The report format of all benchmarks: figures with spread, machine, commit, plots.

    report = Report("cold", __doc__)
    for _ in range(rounds):
        with report.trying("a cold start"):
            seconds.append(await one())
    report.spread("cold", seconds, failed=rounds - len(seconds))
    report.writes("create", written, operations)
    report.against("cold", ["bwrap", "crun"])
    report.finish()

Times are the client's and in seconds; they are shown in milliseconds. `finish` prints a table,
draws it into `results/` (`results/quick/` for a look only), and ends with one line of JSON; it
fails instead where nothing of a series went well. Run as a script, this says where and what is
measured, and draws a result that brought no drawing of its own:

    python bench/reporting.py [RESULT.json]
"""

import argparse
import contextlib
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results"
LOOKS = RESULTS / "quick"
"""Results of quick runs: never published."""
SHARES = {"p50_ms": 0.5, "p95_ms": 0.95, "p99_ms": 0.99}
COLUMNS = ("n", "success", *SHARES, "max_ms")
MARKERS = {"p50_ms": "o", "p95_ms": "|", "p99_ms": "d", "max_ms": "."}
MEASURED = ("src", "bench", ":(exclude)bench/results")
"""Paths that a figure depends on; results change while suites run."""
HELP = """`scripts/install-rivals` installs what is set beside it: bubblewrap, crun, podman, nginx,
HAProxy, wrk, Envoy, skopeo, umoci and OpenSandbox's server. What is missing is named as missing in
the result."""


def machine() -> dict[str, object]:
    """Return the machine and its load."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    model = ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_gb": round(memory / 1e9, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_1m": round(os.getloadavg()[0], 2),
    }


def commit() -> str:
    """Return the measured commit; `+` means that files were changed since."""
    git = ["git", "-C", str(ROOT)]
    done = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    if done.returncode:
        return "unknown"
    status = [*git, "status", "--porcelain", "--", *MEASURED]
    changed = subprocess.run(status, capture_output=True, text=True).stdout
    return done.stdout.strip() + ("+" if changed else "")


def figure_of(value: float) -> float:
    """Round for display: three places, and four digits below one."""
    return round(value, 3) if abs(value) >= 1 else float(f"{value:.4g}")


def at(ordered: list[float], share: float) -> float:
    """Return a percentile of sorted samples: the nearest rank."""
    # Round first: a product such as 0.95 * 100 may be slightly above its exact value.
    return ordered[max(0, math.ceil(round(len(ordered) * share, 6)) - 1)]


def spread(samples: list[float], failed: int = 0) -> dict[str, float]:
    """Summarize samples: percentiles, maximum, count, and share of successes."""
    tried = len(samples) + failed
    summary: dict[str, float] = {"n": tried, "success": round(len(samples) / tried, 4)}
    if samples:
        ordered = sorted(samples)
        summary |= {name: figure_of(at(ordered, share) * 1e3) for name, share in SHARES.items()}
        summary["max_ms"] = figure_of(ordered[-1] * 1e3)
    return summary


class Report:
    """Collects and prints the results of one benchmark."""

    def __init__(
        self,
        name: str,
        text: str | None = None,
        options: Callable[[argparse.ArgumentParser], object] | None = None,
    ) -> None:
        parser = argparse.ArgumentParser(
            description=text or name,
            epilog=HELP,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument("--quick", action="store_true", help="at most a minute, for a look")
        if options is not None:
            options(parser)
        self.name = name
        self.given = parser.parse_args()
        self.is_quick: bool = self.given.quick
        self.figures: dict[str, object] = {}
        self.how: dict[str, str] = {}
        """Kind of a single figure: one run, a median, a mean, or the best of several."""
        self.ratios: dict[str, float] = {}
        self.missing: dict[str, str] = {}
        """Alternatives that are absent, and why."""
        self._failed_series: list[str] = []
        """Series without a success."""
        self._machine = machine()  # Before the benchmark adds its own load.
        self._began = time.monotonic()

    def note(self, text: str) -> None:
        """Print progress."""
        print(f"[{time.monotonic() - self._began:6.1f} s] {text}", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def trying(self, what: str) -> Generator[None]:
        """Continue when one attempt fails, and print why; the caller counts it as failed."""
        try:
            yield
        except Exception as error:
            self.note(f"{what} failed: {error!r:.300}")

    def spread(
        self, name: str, samples: list[float], *, failed: int = 0, is_ours: bool = True
    ) -> None:
        """Add one series; an alternative without a success is absent."""
        if not samples and not failed:
            return
        if not samples and not is_ours:
            self.absent(name, f"all of {failed} tries failed")
            return
        if not samples:
            self._failed_series.append(name)
        self.figures[name] = spread(samples, failed)
        self.note(f"{name}: {self.figures[name]}")

    def figure(self, name: str, value: float, how: str = "one run") -> None:
        """Add one figure and its kind: one run, a median, a mean, the best."""
        self.figures[name] = figure_of(value)
        self.how[name] = how
        self.note(f"{name}: {self.figures[name]} ({how})")

    def writes(self, operation: str, written: float, count: int) -> None:
        """Add the store writes per operation."""
        name = f"store_writes_per_{operation}"
        self.figure(name, written / max(count, 1), f"mean of {count:,}")

    def absent(self, name: str, reason: str) -> None:
        """Record that an alternative is absent, and why."""
        self.missing[name] = reason
        self.note(f"{name}: {reason}")

    def ratio(self, name: str, ours: str, other: str, *, key: str = "p50_ms") -> None:
        """Add the ratio of two series, by default of their medians."""
        above, below = self._value(ours, key), self._value(other, key)
        if above is not None and below:
            self.ratios[name] = figure_of(above / below)

    def against(self, ours: str, others: Iterable[str], *, label: str = "") -> None:
        """Add the ratios to each of several series that exist."""
        for other in others:
            self.ratio(f"{label or ours}_to_{other}", ours, other)

    def _value(self, name: str, key: str) -> float | None:
        found = self.figures.get(name)
        if isinstance(found, dict):
            found = found.get(key)
        return found if isinstance(found, (int, float)) else None

    def finish(self, **more: object) -> None:
        """Print the table, draw the plot, and end with one line of JSON."""
        if self._failed_series:
            raise SystemExit(f"nothing went well of {', '.join(self._failed_series)}")
        result = {
            "bench": self.name,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": commit(),
            "machine": self._machine,
            "quick": self.is_quick,
            "seconds": round(time.monotonic() - self._began, 1),
            "figures": self.figures,
            "how": self.how,
            "ratios": self.ratios,
            "missing": self.missing,
            **more,
        }
        print_table(result)
        place = LOOKS if self.is_quick else RESULTS
        place.mkdir(parents=True, exist_ok=True)
        draw(result, place / f"{self.name}.png")
        print(json.dumps(result))


def print_table(result: dict[str, Any]) -> None:
    """Print the machine, all series, all single figures, and what is absent."""
    where = result["machine"]
    print(f"{result['bench']} at {result['commit']}, {result['date']}, {result['seconds']} s")
    print(
        f"on {where['cores']} cores of {where['cpu']}, {where['memory_gb']} GB, kernel "
        f"{where['kernel']}, Python {where['python']}, load {where['load_1m']}"
    )
    figures: dict[str, object] = result["figures"]
    series = {name: value for name, value in figures.items() if isinstance(value, dict)}
    width = max(map(len, (*figures, *result["ratios"], *result["missing"], "series")))
    if series:
        print(f"{'series':{width}}", *(f"{key.removesuffix('_ms'):>9}" for key in COLUMNS))
    for name, value in series.items():
        cells = (f"{value[key]:>9g}" if key in value else f"{'-':>9}" for key in COLUMNS)
        print(f"{name:{width}}", *cells)
    single = {name: value for name, value in figures.items() if name not in series}
    for name, value in {**single, **result["ratios"], **result["missing"]}.items():
        said = value if isinstance(value, str) else f"{value:9g}"
        print(f"{name:{width}} {said} {result['how'].get(name, '')}".rstrip())


def plotting() -> Any | None:
    """Return matplotlib's pyplot, if it is installed."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        print("no plot: matplotlib is not installed", file=sys.stderr)
        return None
    return pyplot


def draw(result: dict[str, Any], target: Path) -> None:
    """Draw a result, one line per name: the times of each series, and every ratio."""
    figures: dict[str, Any] = result.get("figures", {})
    series = {
        name: item for name, item in figures.items() if isinstance(item, dict) and "p50_ms" in item
    }
    ratios = {name: value for name, value in result.get("ratios", {}).items() if value > 0}
    pyplot = plotting()
    if pyplot is None or not (series or ratios):
        return
    drawn: list[tuple[Callable[[Any, dict[str, Any]], None], dict[str, Any]]]
    drawn = [(_times, series), (_ratios, ratios)]
    parts = [(part, lines) for part, lines in drawn if lines]
    heights = [1.2 + 0.26 * len(lines) for _, lines in parts]
    figure, panels = pyplot.subplots(
        len(parts),
        figsize=(11, 0.4 + sum(heights)),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    commit, date = result.get("commit"), str(result.get("date", ""))[:10]
    figure.suptitle(f"{result['bench']}, {commit}, {date}")
    for (part, lines), (axes,) in zip(parts, panels, strict=True):
        part(axes, lines)
        # As in the table: the first name at the top.
        axes.set_yticks(range(len(lines)), list(lines), fontsize="small")
        axes.set_ylim(len(lines) - 0.5, -0.5)
        axes.set_xscale("log")
        axes.margins(x=0.1)
        axes.grid(visible=True, alpha=0.3)
    figure.savefig(target, dpi=80)
    pyplot.close(figure)


def _times(axes: Any, series: dict[str, dict[str, float]]) -> None:
    for number, item in enumerate(series.values()):
        axes.plot((item["p50_ms"], item["max_ms"]), (number, number), color="0.75", zorder=1)
        _label(axes, item["p50_ms"], number)
    for (key, marker), color in zip(MARKERS.items(), ("C0", "C1", "C3", "0.5"), strict=True):
        values = [item[key] for item in series.values()]
        axes.scatter(values, range(len(values)), marker=marker, color=color, label=key[:-3])
    axes.set_xlabel("milliseconds, by the client's clock; the number is p50")
    axes.legend(ncols=len(MARKERS), loc="lower right", bbox_to_anchor=(1, 1), fontsize="small")


def _ratios(axes: Any, ratios: dict[str, float]) -> None:
    for number, value in enumerate(ratios.values()):
        axes.plot((1.0, value), (number, number), color="C0", linewidth=5, solid_capstyle="butt")
        _label(axes, value, number, is_right=value >= 1)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("ratio to what it is set against in the same run; 1 is the same")


def _label(axes: Any, value: float, number: int, *, is_right: bool = False) -> None:
    axes.annotate(
        f"{value:.0f}" if value >= 100 else f"{value:.3g}",
        (value, number),
        (7 if is_right else -7, 0),
        textcoords="offset points",
        ha="left" if is_right else "right",
        va="center",
        fontsize="x-small",
    )


def main() -> None:
    if len(sys.argv) > 1:
        path = Path(sys.argv[1])
        draw(json.loads(path.read_text()), path.with_suffix(".png"))
    date = datetime.now(UTC).isoformat(timespec="seconds")
    print(json.dumps({"date": date, "commit": commit(), "machine": machine()}))


if __name__ == "__main__":
    main()
