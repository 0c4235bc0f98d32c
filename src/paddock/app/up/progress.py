"""How `paddock up` tells of its progress: a live line and a bar on a terminal, plain lines in a
log, nothing to programs, and through a pipe to whoever started it in the background.
"""

import os
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

from paddock.app.up.pool_progress import Warmth

WARMING = "warming sandboxes"


class Told(Protocol):
    """Takes in progress, from `with` to its end."""

    def say(self, text: str) -> None:
        """Take in what is being done now."""
        ...

    def warm(self, warmth: Warmth) -> None:
        """Take in how far the first pool is."""
        ...

    def stop(self) -> None:
        """Show no more; again is harmless."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class Silence:
    """Shows nothing."""

    def say(self, text: str) -> None:
        """Take in what is being done now."""

    def warm(self, warmth: Warmth) -> None:
        """Take in how far the first pool is."""

    def stop(self) -> None:
        """Show no more."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


class Lines(Silence):
    """One line for each step, for logs."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def say(self, text: str) -> None:
        """Write what is being done now."""
        self._console.print(text, markup=False, soft_wrap=True)

    def warm(self, warmth: Warmth) -> None:
        """Write how far the first pool is."""
        if warmth.desired:
            self.say(f"{WARMING}: {warmth.available} of {warmth.desired}")


class Bar(Silence):
    """One line that changes, for people at a terminal; what must stay is written above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            SpinnerColumn(), TextColumn("{task.description}"), console=console, transient=True
        )
        self._task = self._progress.add_task("starting", total=None)
        self._is_warming = False

    def say(self, text: str) -> None:
        """Show what is being done now."""
        if self._is_warming:
            self._progress.console.print(text, markup=False)
        else:
            self._progress.update(self._task, description=text)

    def warm(self, warmth: Warmth) -> None:
        """Show how far the first pool is."""
        if not warmth.desired:
            return
        if not self._is_warming:
            self._is_warming = True
            self._progress.columns = (*self._progress.columns, BarColumn(), MofNCompleteColumn())
        self._progress.update(
            self._task,
            description=WARMING,
            completed=warmth.available,
            total=warmth.desired,
            refresh=True,
        )

    def stop(self) -> None:
        """Take the line away."""
        self._progress.stop()

    def __enter__(self) -> Self:
        self._progress.start()
        return self


class Pipe(Silence):
    """Passes everything on to the process that waits for us."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def say(self, text: str) -> None:
        """Pass on what is being done now."""
        self.send("say", text)

    def warm(self, warmth: Warmth) -> None:
        """Pass on how far the first pool is."""
        self.send("warm", f"{warmth.available} {warmth.desired}")

    def send(self, word: str, text: str) -> None:
        """Send one line."""
        os.write(self._descriptor, f"{word} {' '.join(text.splitlines())}\n".encode())

    @staticmethod
    def pass_on(line: str, told: Told) -> tuple[str, str] | None:
        """Show one line that came; gives its word and text where it is no progress."""
        word, _, text = line.rstrip("\n").partition(" ")
        if word == "say":
            told.say(text)
        elif word == "warm":
            available, _, desired = text.partition(" ")
            told.warm(Warmth(int(available), int(desired)))
        else:
            return word, text
        return None


def teller(console: Console, *, is_silent: bool) -> Told:
    """Choose how progress is told."""
    if is_silent:
        return Silence()
    return Bar(console) if console.is_terminal else Lines(console)
