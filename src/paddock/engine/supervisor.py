"""Starting and stopping the parts of a process in order.

Groups start one after the other, each when the one before is ready: first what answers health
checks, then caches until they have synced, then everything else, then what only a leader runs, at
last what clients speak to. They stop in reverse, all under one deadline. The first part that fails
stops all, and its error is raised. A second signal ends the waiting.
"""

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable
from enum import IntEnum

from msgspec import Struct

from paddock.kit.errors import DeadlineExceededError, PaddockError
from paddock.kit.logs import fields
from paddock.kit.tasks import cancel_and_wait

log = logging.getLogger(__name__)

_LAST_MOMENT_SECONDS = 0.05


class StartGroup(IntEnum):
    """When a part starts; it stops in reverse."""

    HTTP = 1
    """What answers health checks and metrics: first in, last out."""
    CACHES = 2
    """Until synced."""
    OTHERS = 3
    LEADERS = 4
    """What only a leader runs."""
    API = 5
    """What clients speak to, where that needs all the rest: last in, first out."""


class Part(Struct, frozen=True, kw_only=True):
    """One thing that runs as long as the process."""

    name: str
    group: StartGroup
    run: Callable[[], Awaitable[None]]
    """Runs until cancelled; returning is a failure unless `is_finite`."""
    ready: Callable[[], Awaitable[None]] | None = None
    """Returns when those that come after may start."""
    is_finite: bool = False


class PartEndedError(PaddockError):
    """A part that should run as long as the process has ended by itself."""

    reason = "PartEnded"


class ForcedStop(PaddockError):  # noqa: N818 - an end that somebody asked for
    """Somebody asked twice to stop; what had not ended was left behind."""

    reason = "ForcedStop"


class Supervisor:
    """Runs parts; each is added before `run`."""

    def __init__(self, *, start_seconds: float = 120.0, stop_seconds: float = 30.0) -> None:
        self._start_seconds = start_seconds
        self._stop_seconds = stop_seconds
        self._parts: list[Part] = []
        self._tasks: dict[asyncio.Task[None], Part] = {}
        self._asked = 0
        self._is_started = False
        self._bell = asyncio.Event()
        """Rings when a part ends or somebody asks for the end."""

    def add(self, part: Part) -> None:
        """Add a part."""
        self._parts.append(part)

    @property
    def is_started(self) -> bool:
        """Whether every part has become ready and none is stopping."""
        return self._is_started and not self._asked

    def stop(self) -> None:
        """Ask for the end; again: do not wait for it."""
        self._asked += 1
        self._bell.set()

    async def run(self) -> None:
        """Start everything, stay until asked to stop or until something fails, stop everything."""
        try:
            await self._start_all()
            self._is_started = True
            while not self._asked:
                await self._ring()
                self._raise_ended()
        except BaseException:
            # The first failure is the one to tell; the log has what else went wrong.
            await self._stop_all()
            raise
        left_behind = await self._stop_all()
        if left_behind:
            raise self._did_not_stop(left_behind)

    # ---- starting ------------------------------------------------------------------------

    async def _start_all(self) -> None:
        patience = asyncio.timeout(self._start_seconds)
        try:
            async with patience:
                for group in StartGroup:
                    await self._start_group(group)
        except TimeoutError as error:
            if not patience.expired():
                raise
            raise DeadlineExceededError(
                f"start-up took longer than {self._start_seconds:g} s"
            ) from error

    async def _start_group(self, group: StartGroup) -> None:
        if self._asked:
            return
        parts = [part for part in self._parts if part.group is group]
        for part in parts:
            task = self._spawn(part.run, part.name)
            self._tasks[task] = part
            log.info("part started", extra=fields(part=part.name, group=group.name.lower()))
        for part in parts:
            if part.ready is not None:
                await self._until_ready(part.name, part.ready)

    def _spawn(self, work: Callable[[], Awaitable[None]], name: str) -> asyncio.Task[None]:
        async def live() -> None:
            await work()

        # Owned here and nowhere else: whoever spawns it waits for its end.
        task = asyncio.get_running_loop().create_task(live(), name=name)
        task.add_done_callback(lambda _: self._bell.set())
        return task

    async def _until_ready(self, name: str, ready: Callable[[], Awaitable[None]]) -> None:
        waiting = self._spawn(ready, f"{name} ready")
        try:
            while not waiting.done() and not self._asked:
                await self._ring()
                self._raise_ended()
            if waiting.done():
                await waiting
                log.info("part ready", extra=fields(part=name))
        finally:
            if not waiting.done():
                await cancel_and_wait(waiting)

    async def _ring(self) -> None:
        await self._bell.wait()
        self._bell.clear()

    def _raise_ended(self) -> None:
        for task, part in list(self._tasks.items()):
            if not task.done():
                continue
            del self._tasks[task]
            if task.cancelled():
                raise PartEndedError(f"{part.name} was cancelled by somebody else")
            error = task.exception()
            if error is not None:
                log.error("part failed", extra=fields(part=part.name, error=repr(error)))
                raise error
            if not part.is_finite:
                raise PartEndedError(f"{part.name} ended by itself")
            log.info("part finished", extra=fields(part=part.name))

    # ---- stopping ------------------------------------------------------------------------

    async def _stop_all(self) -> list[str]:
        """Stop everything in reverse; gives the names of what did not stop in time."""
        self._asked = max(self._asked, 1)
        deadline = asyncio.get_running_loop().time() + self._stop_seconds
        left_behind: list[str] = []
        for group in reversed(StartGroup):
            tasks = [task for task, part in self._tasks.items() if part.group is group]
            for task in tasks:
                task.cancel()
            await self._until_ended(tasks, deadline)
            for task in tasks:
                part = self._tasks.pop(task)
                if task.done():
                    _note_end(part, task)
                else:
                    left_behind.append(part.name)
        if left_behind:
            log.warning("parts did not stop in time", extra=fields(parts=", ".join(left_behind)))
        return left_behind

    async def _until_ended(self, tasks: list[asyncio.Task[None]], deadline: float) -> None:
        # Even past the deadline each gets a moment to hear of its cancellation.
        patience = max(deadline - asyncio.get_running_loop().time(), _LAST_MOMENT_SECONDS)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                while self._asked < 2 and any(not task.done() for task in tasks):
                    await self._ring()

    def _did_not_stop(self, names: list[str]) -> PaddockError:
        what = ", ".join(names)
        if self._asked > 1:
            return ForcedStop(f"stopped without waiting for: {what}")
        return DeadlineExceededError(f"did not stop within {self._stop_seconds:g} s: {what}")


def _note_end(part: Part, task: asyncio.Task[None]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is None:
        log.info("part stopped", extra=fields(part=part.name))
    else:
        log.warning("part failed while stopping", extra=fields(part=part.name, error=repr(error)))


@contextlib.asynccontextmanager
async def stopping_on_signals(
    supervisor: Supervisor, *signals: signal.Signals
) -> AsyncGenerator[None]:
    """Let SIGINT and SIGTERM (or others) ask the supervisor to stop, as long as the body runs."""
    loop = asyncio.get_running_loop()
    caught = signals or (signal.SIGINT, signal.SIGTERM)

    def asked(number: signal.Signals) -> None:
        log.info("signal received", extra=fields(signal=number.name))
        supervisor.stop()

    for number in caught:
        loop.add_signal_handler(number, asked, number)
    try:
        yield
    finally:
        for number in caught:
            loop.remove_signal_handler(number)
