"""Events of a process: the queue of a subscriber, and events built from exits and output."""

import asyncio
from collections import deque
from collections.abc import Callable

from paddock.envd.process.spawner import ExitStatus
from paddock.envd.rpc.messages import DataEvent, EndEvent, ProcessEvent

# Signal names as Go's runtime prints them; clients compare these strings.
_SIGNAL_NAMES = {
    1: "hangup", 2: "interrupt", 3: "quit", 4: "illegal instruction", 5: "trace/breakpoint trap",
    6: "aborted", 7: "bus error", 8: "floating point exception", 9: "killed",
    10: "user defined signal 1", 11: "segmentation fault", 12: "user defined signal 2",
    13: "broken pipe", 14: "alarm clock", 15: "terminated",
}  # fmt: skip


def end_event(status: ExitStatus, cause: str | None = None) -> EndEvent:
    """Return the end event of an exit, with the strings that clients compare.

    `status` is always one of these; `cause` follows it in `error`.
    """
    because = f": {cause}" if cause else ""
    if status.signal:
        status_text = "signal: " + _SIGNAL_NAMES.get(status.signal, f"signal {status.signal}")
        if status.is_core_dumped:
            status_text += " (core dumped)"
        error = status_text + because
        return EndEvent(exit_code=-1, exited=False, status=status_text, error=error)
    status_text = f"exit status {status.code}"
    error = status_text + because if status.code else None
    return EndEvent(exit_code=status.code, exited=True, status=status_text, error=error)


class Subscription:
    """The queue of events of one subscriber."""

    def __init__(self, on_taken: Callable[[], None]) -> None:
        self._on_taken = on_taken
        self._events: deque[ProcessEvent] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self.buffered = 0

    def push(self, event: ProcessEvent, size: int) -> None:
        self._events.append(event)
        self.buffered += size
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self, timeout: float) -> list[ProcessEvent]:
        """Wait for events and return all of them; return none after `timeout` seconds."""
        if not self._events:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(timeout):
                    await self._waiter
            except TimeoutError:
                return []
            finally:
                self._waiter = None
        taken = list(self._events)
        self._events.clear()
        self.buffered = 0
        self._on_taken()
        return taken


def data_event(name: str, data: bytes) -> DataEvent:
    """Return the event of output from `stdout`, `stderr` or `pty`."""
    if name == "stdout":
        return DataEvent(stdout=data)
    return DataEvent(stderr=data) if name == "stderr" else DataEvent(pty=data)
