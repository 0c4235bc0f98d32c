"""The supervisor: start and stop the parts of a process in order.

Groups start one after another, each when the previous one is ready: health checks, caches until
they have synced, everything else, what only a leader runs, and the APIs for clients. They stop in
reverse, under one deadline. The first part that fails stops all, and its error is raised. A second
signal stops without waiting.
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

_GRACE_SECONDS = 0.05


class StartGroup(IntEnum):
    """The order in which parts start; they stop in reverse."""

    HTTP = 1
    """Health checks and metrics: start first, stop last."""
    CACHES = 2
    """Until synced."""
    OTHERS = 3
    LEADERS = 4
    """Runs on the leader only."""
    API = 5
    """APIs for clients that need all the rest: start last, stop first."""


class Part(Struct, frozen=True, kw_only=True):
    """A task that runs as long as the process."""

    name: str
    group: StartGroup
    run: Callable[[], Awaitable[None]]
    """Runs until cancelled; returning is a failure unless `is_finite`."""
    ready: Callable[[], Awaitable[None]] | None = None
    """Returns when the next group may start."""
    is_finite: bool = False


class PartEndedError(PaddockError):
    """A part returned, though it should run as long as the process."""

    reason = "PartEnded"


class ForcedStop(PaddockError):  # noqa: N818 - requested, not an error
    """Stop was requested twice; parts that had not ended were abandoned."""

    reason = "ForcedStop"


class Supervisor:
    """Runs parts; each is added before `run`."""

    def __init__(self, *, start_seconds: float = 120.0, stop_seconds: float = 30.0) -> None:
        self._start_seconds = start_seconds
        self._stop_seconds = stop_seconds
        self._parts: list[Part] = []
        self._tasks: dict[asyncio.Task[None], Part] = {}
        self._stop_requests = 0
        self._is_started = False
        self._changed = asyncio.Event()
        """Set when a part ends or stop is requested."""

    def add(self, part: Part) -> None:
        """Add a part."""
        self._parts.append(part)

    @property
    def is_started(self) -> bool:
        """Whether every part has become ready and none is stopping."""
        return self._is_started and not self._stop_requests

    def stop(self) -> None:
        """Request a stop; a second call stops without waiting."""
        self._stop_requests += 1
        self._changed.set()

    async def run(self) -> None:
        """Start all parts, run until stop is requested or a part fails, stop all parts."""
        try:
            await self._start_all()
            self._is_started = True
            while not self._stop_requests:
                await self._wait_for_change()
                self._raise_ended()
        except BaseException:
            # The first failure is raised; later ones are in the log.
            await self._stop_all()
            raise
        left_behind = await self._stop_all()
        if left_behind:
            raise self._did_not_stop(left_behind)

    # ---- starting ------------------------------------------------------------------------

    async def _start_all(self) -> None:
        limit = asyncio.timeout(self._start_seconds)
        try:
            async with limit:
                for group in StartGroup:
                    await self._start_group(group)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise DeadlineExceededError(
                f"start-up took longer than {self._start_seconds:g} s"
            ) from error

    async def _start_group(self, group: StartGroup) -> None:
        if self._stop_requests:
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

        # Owned here only: the caller waits for its end.
        task = asyncio.get_running_loop().create_task(live(), name=name)
        task.add_done_callback(lambda _: self._changed.set())
        return task

    async def _until_ready(self, name: str, ready: Callable[[], Awaitable[None]]) -> None:
        waiting = self._spawn(ready, f"{name} ready")
        try:
            while not waiting.done() and not self._stop_requests:
                await self._wait_for_change()
                self._raise_ended()
            if waiting.done():
                await waiting
                log.info("part ready", extra=fields(part=name))
        finally:
            if not waiting.done():
                await cancel_and_wait(waiting)

    async def _wait_for_change(self) -> None:
        await self._changed.wait()
        self._changed.clear()

    def _raise_ended(self) -> None:
        for task, part in list(self._tasks.items()):
            if not task.done():
                continue
            del self._tasks[task]
            if task.cancelled():
                raise PartEndedError(f"{part.name} was cancelled from outside")
            error = task.exception()
            if error is not None:
                log.error("part failed", extra=fields(part=part.name, error=repr(error)))
                raise error
            if not part.is_finite:
                raise PartEndedError(f"{part.name} ended by itself")
            log.info("part finished", extra=fields(part=part.name))

    # ---- stopping ------------------------------------------------------------------------

    async def _stop_all(self) -> list[str]:
        """Stop all parts in reverse; returns the names of those that did not stop in time."""
        self._stop_requests = max(self._stop_requests, 1)
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
        # Even past the deadline each gets a moment to handle its cancellation.
        limit = max(deadline - asyncio.get_running_loop().time(), _GRACE_SECONDS)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit):
                while self._stop_requests < 2 and any(not task.done() for task in tasks):
                    await self._wait_for_change()

    def _did_not_stop(self, names: list[str]) -> PaddockError:
        what = ", ".join(names)
        if self._stop_requests > 1:
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
    """Stop the supervisor on SIGINT and SIGTERM (or others) while the body runs."""
    loop = asyncio.get_running_loop()
    caught = signals or (signal.SIGINT, signal.SIGTERM)

    def stop_on(number: signal.Signals) -> None:
        log.info("signal received", extra=fields(signal=number.name))
        supervisor.stop()

    for number in caught:
        loop.add_signal_handler(number, stop_on, number)
    try:
        yield
    finally:
        for number in caught:
            loop.remove_signal_handler(number)
