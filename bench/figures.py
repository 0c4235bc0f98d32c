"""Writes the figures of pages: each from a result in `results/`, beside the script that made it.

    python bench/figures.py            show the tables
    python bench/figures.py --write    put them into their pages

A row without a result is left out; a test fails when a page differs from the results. All rows of
one page are of one machine."""

import json
import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
TAIL = "_at_p99"
"""Suffix of the name of a ratio of two p99s."""
BEGIN, END = "<!-- figures: python bench/figures.py --write -->", "<!-- end of figures -->"


class Row(NamedTuple):
    """One line of the table: what was measured, and where its figures are."""

    what: str
    suite: str
    figure: str
    unit: str = "ms"
    beside: tuple[tuple[str, str], ...] = ()
    """Names of the ratios shown beside it, each with what it is compared to."""


ROWS = (
    Row("`Sandbox.create()` to the first command's output: E2B's SDK, warm pool, one by one",
        "claim", "sequential", beside=(("sequential_to_podman", "`podman run`"),)),
    Row("the same with the asynchronous SDK, on a pool of 20 that is filled up meanwhile",
        "tti", "sequential_total", beside=(("sequential_to_podman", "`podman run`"),)),
    Row("the same, Poisson arrivals for 60 s", "tti", "poisson_total"),
    Row("the same, 100 at once on a pool of 110", "tti", "burst_100_total"),
    Row("100 at once on a pool of 20: those for whom it was empty", "tti",
        "burst_100_pool_20_cold_total"),
    Row("100 at once on a pool of 110, until the last has answered", "claim", "burst_wall_s",
        unit="s"),
    Row("cold start (no pool) to the first command's output", "cold", "cold_total",
        beside=(("cold_to_bwrap", "bubblewrap"), ("cold_to_podman", "`podman run`"))),
    Row("cold create alone", "cold", "cold_create",
        beside=(("cold_create_to_opensandbox_create", "OpenSandbox's server on podman"),)),
    Row("pause by freezing", "pause_wake", "freeze_pause",
        beside=(("freeze_pause_to_podman", "`podman pause`"),)),
    Row("a request that wakes a frozen sandbox", "pause_wake", "freeze_wake_by_request",
        beside=(("freeze_wake_to_running", "one that runs"),)),
    Row("a request that wakes a hibernated sandbox", "pause_wake", "hibernate_wake_by_request"),
    Row("clone of a live 30 MB sandbox to its first command", "hibernate_fork",
        "clone_to_first_command", beside=(("clone_to_copy_30mb", "copying 30 MB"),)),
    Row("fork, each of 50", "hibernate_fork", "fork_each_ms"),
    Row("idle sandbox in the pool", "density", "pooled_mb_each", unit="MB",
        beside=(("pooled_to_podman_sleep", "`sleep` in podman"),)),
    Row("100 warm sandboxes delivered as one batch", "batch", "real_deliver_100"),
    Row("a task in each of 100 sandboxes of a batch", "batch", "real_tasks_100",
        beside=(("real_task_to_podman", "`podman run true`, each"),)),
    Row("a request through the gateway, 1,000 a second", "gateway", "paddock_calm",
        beside=(("calm_to_nginx", "nginx"), ("calm_to_haproxy", "HAProxy"))),
    Row("requests through one gateway on one core", "gateway", "paddock_rps", unit="per second",
        beside=(("rps_to_nginx", "nginx"), ("rps_to_haproxy", "HAProxy"))),
    Row("bytes through one gateway", "gateway", "paddock_stream_mb_per_s", unit="MB/s",
        beside=(("stream_mb_per_s_to_direct", "no proxy"), ("stream_mb_per_s_to_nginx", "nginx"))),
    Row("durable compare-and-swap, 64 writers", "store", "cas_64_writers"),
    Row("the same, together", "store", "cas_64_writers_per_second", unit="per second",
        beside=(("cas_64_writers_per_second_to_sqlite", "SQLite, a transaction each"),)),
    Row("create among 100,000 sandboxes (simulated runtime)", "scale", "create_100000",
        beside=(("create_100000_to_1000", "among 1,000"),)),
    Row("a command inside, by envd alone", "envd", "command",
        beside=(("command_to_bare_exec", "fork and exec"),)),
    Row("network of a sandbox", "net", "attach", beside=(("attach_to_attach_by_ip", "`ip`"),)),
)  # fmt: skip
POD_ROWS = (
    Row("`Sandbox.create()` to the first command's output: E2B's SDK, warm pool",
        "kubernetes_pods", "warm_first_command",
        beside=(("warm_to_bare_pod", "a bare pod until it runs"),)),
    Row("the same without a pool", "kubernetes_pods", "cold_first_command",
        beside=(("cold_to_bare_pod", "a bare pod until it runs"),)),
    Row("pause by freezing", "kubernetes_pods", "warm_pause"),
    Row("resume", "kubernetes_pods", "warm_resume"),
    Row("resume to the first command's output", "kubernetes_pods", "warm_resume_first_command"),
)  # fmt: skip


class Page(NamedTuple):
    """A page with a table of figures."""

    path: str
    rows: tuple[Row, ...]

    @property
    def up(self) -> str:
        """The way from the page to the root of the repository."""
        return "../" * self.path.count("/")


README = Page("README.md", ROWS)
PAGES = (README, Page("docs/how-to/kubernetes.md", POD_ROWS))


def result_of(suite: str) -> dict[str, Any] | None:
    """Return the kept result of a suite, unless it is a quick run."""
    path = RESULTS / f"{suite}.json"
    if not path.exists():
        return None
    found = json.loads(path.read_text())
    return None if found.get("quick") else found


def line(row: Row, up: str = "") -> str | None:
    """Return one row; `None` without a result."""
    result = result_of(row.suite)
    value = (result or {}).get("figures", {}).get(row.figure)
    if result is None or value is None:
        return None
    if isinstance(value, dict):
        cells = [spoken(value["p50_ms"]), spoken(value["p99_ms"]), f"{value['n']:,}"]
        if value.get("success", 1) != 1:
            cells[-1] += f" ({value['success']:.1%})"
    else:
        cells = [spoken(value), "", result.get("how", {}).get(row.figure, "")]
    script = f"[{row.suite}.py]({up}bench/{row.suite}.py)"
    made = f"{script}, [{result['commit']}]({up}{_kept(row.suite)})"
    return f"| {row.what} | {row.unit} | {' | '.join(cells)} | {_beside(row, result)} | {made} |"


def _beside(row: Row, result: dict[str, Any]) -> str:
    """Return the ratios of a result: of the medians, and of the tails if present."""
    ratios: dict[str, float] = result["ratios"]
    said: list[str] = []
    for name, other in row.beside:
        if name in ratios:
            tail = ratios.get(f"{name}{TAIL}")
            more = f" (p99: {spoken(tail, digits=2)})" if tail else ""
            said.append(f"{spoken(ratios[name], digits=2)} times {other}{more}")
    return ", ".join(said)


def spoken(value: float, *, digits: int = 3) -> str:
    """Format a figure with its significant digits: the results keep all."""
    if not value:
        return "0"
    behind = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{behind}f}"


def _kept(suite: str) -> str:
    return f"bench/results/{suite}.json"


def table(page: Page = README) -> str:
    """Return the whole table of a page."""
    lines = [text for row in page.rows if (text := line(row, page.up)) is not None]
    if not lines:
        return "No results are kept yet: `paddock bench` makes them."
    measured = next(found for row in page.rows if (found := result_of(row.suite)) is not None)
    machine = measured["machine"]
    where = f"{machine['cores']} cores ({machine['cpu']}), {machine['memory_gb']:g} GB"
    head = [
        f"On {where}, by the client's clock; the script in the last column measures it. A single",
        "figure has no p99; its column n states how it was taken.",
        "",
        "| | unit | p50 | p99 | n | compared with | measured by |",
        "|---|---|---|---|---|---|---|",
    ]
    return "\n".join((*head, *lines))


def written(text: str, page: Page = README) -> str:
    """Return the text of a page with its table inserted."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table(page)}\n{END}{after}"


def main() -> None:
    for page in PAGES:
        path = ROOT / page.path
        if "--write" in sys.argv:
            path.write_text(written(path.read_text(), page))
        else:
            print(f"{page.path}\n\n{table(page)}\n")


if __name__ == "__main__":
    main()
