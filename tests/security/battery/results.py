"""Results of a run of the battery: one line of JSON for each attack, and the table of them."""

import json
import os
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from msgspec import Struct

from tests.security.battery.attacks import PRIVILEGES, STATES

_TITLES = {
    "new": "new",
    "woken": "woken",
    "copied": "from a snapshot",
    "forked": "forked",
}


class Result(Struct, frozen=True):
    """One attack in one kind of sandbox."""

    kind: str
    name: str
    privileges: str
    state: str
    is_held: bool
    cost: int = 0
    """Highest kernel memory that nobody was charged for, in bytes, if it was measured."""
    date: str = ""
    kernel: str = ""


class Recorder:
    """Appends results to a file, if there is one."""

    def __init__(self, file: str | None) -> None:
        self._file = Path(file) if file else None

    def record(self, result: Result) -> None:
        """Write one result."""
        if self._file is None:
            return
        line = {name: getattr(result, name) for name in Result.__struct_fields__}
        line |= {"date": datetime.now(UTC).date().isoformat(), "kernel": os.uname().release}
        # One write per line: several processes may append.
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")


def read(file: Path) -> tuple[Result, ...]:
    """Return the results of a file; of an attack that ran twice, the last one."""
    found: dict[tuple[str, ...], Result] = {}
    for line in file.read_text().splitlines():
        result = Result(**json.loads(line))
        found[result.kind, result.name, result.privileges, result.state] = result
    return tuple(found.values())


def table(results: Iterable[Result]) -> str:
    """Return the counts as a table: by class, privileges and state."""
    results = tuple(results)
    cells = [(privileges, state) for privileges in PRIVILEGES for state in STATES]
    tried: Counter[tuple[str, str, str]] = Counter()
    held: Counter[tuple[str, str, str]] = Counter()
    for one in results:
        tried[one.kind, one.privileges, one.state] += 1
        held[one.kind, one.privileges, one.state] += one.is_held
    dates = sorted({one.date for one in results})
    kernels = ", ".join(sorted({one.kernel for one in results}))
    heads = [f"`{privileges}`, {_TITLES[state]}" for privileges, state in cells]
    summary = (
        f"Run of {dates[-1]} with Linux {kernels}: {sum(tried.values())} attacks were tried, "
        f"{sum(held.values())} were held. Each cell has held / tried."
    )
    lines = [
        summary,
        "",
        f"| Attacks on | {' | '.join(heads)} |",
        f"|---|{'---|' * len(cells)}",
    ]
    for kind in dict.fromkeys(one.kind for one in results):
        counts = (f"{held[kind, *cell]} / {tried[kind, *cell]}" for cell in cells)
        lines.append(f"| {kind} | {' | '.join(counts)} |")
    return "\n".join(lines)


BEGIN, END = "<!-- battery: begin -->", "<!-- battery: end -->"


def with_table(page: str, table: str) -> str:
    """Return the page with another table between its marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no marks {BEGIN} and {END}")
    return f"{before}{begin}\n{table}\n{end}{after}"
