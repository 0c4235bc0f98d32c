"""Output: data on standard output, everything else on standard error.

An error is `error:` and one line, then a blank line and `hint:` if an action helps.
"""

import sys
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, Self

import msgspec
from rich.console import Console
from rich.markup import escape

screen = Console(highlight=False)
notes = Console(stderr=True, highlight=False)


class Display:
    """Shows something from `with` to its end."""

    def stop(self) -> None:
        """Show nothing from now on; idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


class Output:
    """Prints results as text or JSON."""

    def __init__(self, format_: str) -> None:
        self._format = format_

    @property
    def is_json(self) -> bool:
        """Whether the format is JSON."""
        return self._format == "json"

    def rows(
        self, items: Sequence[Any], columns: Sequence[str], cells: Iterable[Sequence[str]]
    ) -> None:
        """Print a table, or the items as JSON."""
        if self.is_json:
            self.data(items)
            return
        head = [name.upper() for name in columns]
        rows = [list(row) for row in cells]
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        # Never wrap lines: an id in two parts cannot be copied.
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in (head, *rows)]
        screen.print(f"[bold]{escape(lines[0])}[/]", soft_wrap=True)
        for line in lines[1:]:
            screen.print(line, markup=False, soft_wrap=True)

    def data(self, item: Any) -> None:
        """Print an item as JSON."""
        text = msgspec.json.format(msgspec.json.encode(item)).decode()
        sys.stdout.write(text + "\n")

    def done(self, sentence: str, item: Any) -> None:
        """Print a sentence, or the item as JSON."""
        if self.is_json:
            self.data(item)
        else:
            screen.print(sentence, markup=False, soft_wrap=True)


def fail(message: str, hint: str | None = None) -> None:
    """Print an error."""
    notes.print(f"[bold red]error:[/] {escape(message)}", soft_wrap=True)
    if hint:
        notes.print(f"\n[bold]hint:[/] {escape(hint)}", soft_wrap=True)


def age(moment: str | None, now: datetime) -> str:
    """Return how long ago a time was, as kubectl prints it."""
    if not moment:
        return "-"
    return _span(now - datetime.fromisoformat(moment))


def until(moment: str, now: datetime, *, is_paused: bool = False) -> str:
    """Return the time until an end that the API shows.

    The year 1 means never. A paused sandbox that is kept indefinitely shows when it was paused.
    """
    end = datetime.fromisoformat(moment)
    if end.year == 1 or (is_paused and end <= now):
        return "never"
    return _span(max(end - now, timedelta()))


def _span(time: timedelta) -> str:
    seconds = int(time.total_seconds())
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if abs(seconds) >= 2 * size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"
