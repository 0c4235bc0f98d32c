"""Shows the progress of `paddock up`.

A live line and a bar on a terminal, plain lines in a log, nothing for programs, and a pipe from
the background process to the one that started it.
"""

import os
from types import TracebackType
from typing import Protocol, Self

from rich import progress as rich
from rich.console import Console

from paddock.app.up.pool_progress import PoolProgress
from paddock.cli.output import Display

WARMING = "warming sandboxes"


class Progress(Protocol):
    """Shows progress from `with` to its end."""

    def step(self, text: str) -> None:
        """Show the current step."""
        ...

    def pool(self, progress: PoolProgress) -> None:
        """Show how many sandboxes of the first pool are warm."""
        ...

    def stop(self) -> None:
        """Show nothing from now on; idempotent."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class NullProgress(Display):
    """Shows nothing."""

    def step(self, text: str) -> None:
        """Ignore the step."""

    def pool(self, progress: PoolProgress) -> None:
        """Ignore the progress of the pool."""


class LineProgress(NullProgress):
    """Writes one line per step, for logs."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def step(self, text: str) -> None:
        """Write the current step."""
        self._console.print(text, markup=False, soft_wrap=True)

    def pool(self, progress: PoolProgress) -> None:
        """Write how many sandboxes are warm."""
        if progress.desired:
            self.step(f"{WARMING}: {progress.available} of {progress.desired}")


class BarProgress(NullProgress):
    """Shows one changing line on a terminal; lasting messages are printed above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = rich.Progress(
            rich.SpinnerColumn(),
            rich.TextColumn("{task.description}"),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task("starting", total=None)
        self._is_warming = False

    def step(self, text: str) -> None:
        """Show the current step."""
        if self._is_warming:
            self._progress.console.print(text, markup=False)
        else:
            self._progress.update(self._task, description=text)

    def pool(self, progress: PoolProgress) -> None:
        """Show a bar of the warm sandboxes."""
        if not progress.desired:
            return
        if not self._is_warming:
            self._is_warming = True
            self._progress.columns = (
                *self._progress.columns,
                rich.BarColumn(),
                rich.MofNCompleteColumn(),
            )
        self._progress.update(
            self._task,
            description=WARMING,
            completed=progress.available,
            total=progress.desired,
            refresh=True,
        )

    def stop(self) -> None:
        """Remove the line."""
        self._progress.stop()

    def __enter__(self) -> Self:
        self._progress.start()
        return self


class PipeProgress(NullProgress):
    """Writes messages to a pipe, one per line; `replay` shows them at the other end."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def step(self, text: str) -> None:
        """Send the current step."""
        self.send("step", text)

    def pool(self, progress: PoolProgress) -> None:
        """Send how many sandboxes are warm."""
        self.send("pool", f"{progress.available} {progress.desired}")

    def send(self, kind: str, text: str) -> None:
        """Send one message."""
        os.write(self._descriptor, f"{kind} {' '.join(text.splitlines())}\n".encode())

    @staticmethod
    def replay(line: str, progress: Progress) -> tuple[str, str] | None:
        """Show one message; return its kind and text if it is not progress."""
        kind, _, text = line.rstrip("\n").partition(" ")
        if kind == "step":
            progress.step(text)
        elif kind == "pool":
            available, _, desired = text.partition(" ")
            progress.pool(PoolProgress(int(available), int(desired)))
        else:
            return kind, text
        return None


def open_progress(console: Console, *, is_silent: bool) -> Progress:
    """Return the progress display that fits the console."""
    if is_silent:
        return NullProgress()
    return BarProgress(console) if console.is_terminal else LineProgress(console)
