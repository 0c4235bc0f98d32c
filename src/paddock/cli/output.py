"""What people see: data on standard output, everything else on standard error.

Errors are `error:` and one line; where one action helps, a blank line and `hint:` follow.
"""

import sys
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape

screen = Console(highlight=False)
notes = Console(stderr=True, highlight=False)


class Output:
    """How a command shows what it found."""

    def __init__(self, form: str) -> None:
        self._form = form

    @property
    def is_json(self) -> bool:
        """Whether programs read it."""
        return self._form == "json"

    def rows(
        self, items: Sequence[Any], columns: Sequence[str], cells: Iterable[Sequence[str]]
    ) -> None:
        """Show a table to people, the items themselves to programs."""
        if self.is_json:
            self.data(items)
            return
        head = [name.upper() for name in columns]
        rows = [list(row) for row in cells]
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        # Never wrapped: an id in two pieces can neither be read nor copied.
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in (head, *rows)]
        screen.print(f"[bold]{escape(lines[0])}[/]", soft_wrap=True)
        for line in lines[1:]:
            screen.print(line, markup=False, soft_wrap=True)

    def data(self, item: Any) -> None:
        """Show one thing in full."""
        text = msgspec.json.format(msgspec.json.encode(item)).decode()
        sys.stdout.write(text + "\n")

    def done(self, sentence: str, item: Any) -> None:
        """Say what was done to people, give the thing to programs."""
        if self.is_json:
            self.data(item)
        else:
            screen.print(sentence, markup=False, soft_wrap=True)


def fail(message: str, hint: str | None = None) -> None:
    """Write an error."""
    notes.print(f"[bold red]error:[/] {escape(message)}", soft_wrap=True)
    if hint:
        notes.print(f"\n[bold]hint:[/] {escape(hint)}", soft_wrap=True)


def age(moment: str | None, now: datetime) -> str:
    """Write how long ago something was, as kubectl does."""
    if not moment:
        return "-"
    return _span(now - datetime.fromisoformat(moment))


def until(moment: str, now: datetime) -> str:
    """Write how long it is until something; what the API puts into the year 1 never comes."""
    end = datetime.fromisoformat(moment)
    return "never" if end.year == 1 else _span(max(end - now, timedelta()))


def _span(time: timedelta) -> str:
    seconds = int(time.total_seconds())
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if abs(seconds) >= 2 * size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"
