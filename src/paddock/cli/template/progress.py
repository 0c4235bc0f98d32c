"""Shows how a build goes on: each line, or on a terminal the step that runs."""

import time
from collections.abc import Callable
from typing import Any

from rich.markup import escape
from rich.status import Status

from paddock.cli.output import Display, notes
from paddock.cli.template.log_lines import Heading, parse

_MAX_SHOWN = 100
_KEPT_LINES = 40


class PlainProgress(Display):
    """Prints every line of the log."""

    def __init__(self) -> None:
        self._title = ""

    def begin(self, title: str) -> None:
        """Show what is built next."""
        self._title = title
        self._print(f"=> {title}")

    def note(self, text: str) -> None:
        """Show a remark."""
        self._print(text)

    def entry(self, entry: dict[str, Any]) -> None:
        """Show an entry of the log."""
        self._print(str(entry["message"]))

    def end(self, *, is_ready: bool) -> None:
        """Show the result of what was begun."""
        self._print(f"{'built' if is_ready else 'failed'}: {self._title}")

    def _print(self, text: str) -> None:
        notes.print(text, markup=False, soft_wrap=True)


class TerminalProgress(PlainProgress):
    """Shows the step that runs with its last line; prints the output of one that fails."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._monotonic = monotonic
        self._status: Status | None = None
        self._heading: Heading | None = None
        self._began = 0.0
        self._output: list[str] = []

    def begin(self, title: str) -> None:
        """Show what is built next."""
        super().begin(title)
        self._status = notes.status(escape(title))
        self._status.start()
        self._heading = None
        self._output.clear()

    def entry(self, entry: dict[str, Any]) -> None:
        """Show the step and its last line."""
        found = parse(str(entry["message"]))
        if isinstance(found, Heading):
            self._finish_step()
            if found.is_cached:
                self._step_line("CACHED", found)
            else:
                self._heading, self._began = found, self._monotonic()
        else:
            self._output = [*self._output[1 - _KEPT_LINES :], found.text]
        self._show()

    def end(self, *, is_ready: bool) -> None:
        """Show the result; print what a failed step printed."""
        self._finish_step(is_failed=not is_ready)
        self.stop()
        if not is_ready:
            for line in self._output:
                self._print(f"   {line}")

    def _finish_step(self, *, is_failed: bool = False) -> None:
        if self._heading is not None:
            took = f"{self._monotonic() - self._began:.1f}s"
            self._step_line("FAILED" if is_failed else took, self._heading)
        self._heading = None
        if not is_failed:
            self._output.clear()

    def _step_line(self, state: str, heading: Heading) -> None:
        self._print(f"   {state:>7} [{heading.label}] {_short(heading.text)}")

    def _show(self) -> None:
        if self._status is None:
            return
        text = f"[{self._heading.label}] {_short(self._heading.text)}" if self._heading else ""
        last = _short(self._output[-1]) if self._output else ""
        self._status.update(f"{escape(text)} [dim]{escape(last)}[/]")

    def stop(self) -> None:
        """Remove the line of the step."""
        if self._status is not None:
            self._status.stop()
        self._status = None


class QuietProgress(PlainProgress):
    """Shows nothing."""

    def _print(self, text: str) -> None:
        """Drop the line."""


def progress(kind: str) -> PlainProgress:
    """Return the display of a kind; `auto` decides by the terminal."""
    if kind == "quiet":
        return QuietProgress()
    if kind == "tty" or (kind == "auto" and notes.is_terminal):
        return TerminalProgress()
    return PlainProgress()


def _short(text: str) -> str:
    line = text.splitlines()[0] if text else ""
    cut = len(line) > _MAX_SHOWN or "\n" in text
    return f"{line[:_MAX_SHOWN]}…" if cut else line
