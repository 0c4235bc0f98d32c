"""What every kernel can do."""

from collections.abc import Callable
from typing import Protocol

from code_interpreter.kernels.event_queue import EventQueue
from code_interpreter.kernels.process import Exit


class Kernel(Protocol):
    """A process that runs code of one language and keeps its state between runs."""

    @property
    def end(self) -> Exit | None:
        """How the process ended, or None while it runs."""
        ...

    async def start(self) -> None:
        """Start the process and return once it answers. `KernelError` if it does not."""
        ...

    async def execute(
        self,
        code: str,
        queue: EventQueue,
        *,
        before: str,
        after: str,
        on_prepared: Callable[[], None],
    ) -> None:
        """Run code, put its events into the queue, and return at its end. Only one run at a time.

        `before` and `after` run in silence; `on_prepared` is called when the process has `before`.
        `KernelDiedError` if the process ends.
        """
        ...

    async def interrupt(self, *, is_repeated: bool) -> None:
        """Interrupt the code that runs; if repeated, also the programs that it has started."""
        ...

    async def stop(self) -> None:
        """End the process and remove its files."""
        ...
