"""The node's queue of heavy work: dumps, restores, forks and pulls, in fair turns of the teams.

One such operation can keep a CPU busy for half a minute, and what runs inside a sandbox determines
how long. So a team has only some of the machine's slots, and teams take turns (`kit/fair/slots`).
Another kind of work joins by a new `HeavyKind`. Pulls have slots of their own: they mostly wait for
a registry, which must not keep a team from its sandboxes.
"""

import asyncio
import bisect
import contextlib
import logging
import os
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from typing import Any, ParamSpec, TypeVar

from msgspec import Struct

from paddock.kit.clock import Clock
from paddock.kit.fair.slots import FairSlots
from paddock.kit.logs import fields
from paddock.runtime.port import AgentConfig

log = logging.getLogger(__name__)

LONG_WAIT_SECONDS = 5.0
"""Work that has waited so long is logged, of each team once per `WARN_SECONDS`."""
WARN_SECONDS = 60.0
WAIT_BUCKETS = (0.01, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0, 300.0)
"""Upper bounds of waiting times, in seconds."""

_P = ParamSpec("_P")
_T = TypeVar("_T")


class HeavyKind(StrEnum):
    """Kinds of heavy work; the kinds of one team take turns, too."""

    DUMP = "dump"
    RESTORE = "restore"
    FORK = "fork"
    """A sandbox created from a checkpoint."""
    PULL = "pull"
    """An image from a registry."""


def team_of(agent: AgentConfig, namespace: str) -> str:
    """Return the team of a sandbox. One of a shared pool is not in the namespace of its team."""
    return agent.team or namespace


class HeavyLimits(Struct, frozen=True, kw_only=True):
    """How many operations run at once."""

    total: int
    per_team: int

    @staticmethod
    def of_settings(total: int = 0, per_team: int = 0, *, cpus: int | None = None) -> "HeavyLimits":
        """Return the limits; 0 is the default for this machine.

        By default a team alone keeps all CPUs busy, and three other teams find free slots.
        """
        cores = cpus or os.cpu_count() or 1
        return HeavyLimits(total=total or max(8, 4 * cores), per_team=per_team or max(2, cores))


class WorkReport(Struct, frozen=True, kw_only=True):
    """The state of one kind of work."""

    kind: str
    waiting: int
    running: int
    waits: tuple[int, ...]
    """Operations that were started, by waiting time: one per bucket, then those beyond."""
    waited_seconds: float
    """Of all operations that were started."""


class _Counts:
    """Counters of one kind."""

    def __init__(self) -> None:
        self.waiting = 0
        self.running = 0
        self.waits = [0] * (len(WAIT_BUCKETS) + 1)
        self.waited_seconds = 0.0


class HeavyWork:
    """Admits heavy work and runs its blocking parts in threads of its own."""

    def __init__(self, limits: HeavyLimits, clock: Clock) -> None:
        self._clock = clock
        slots = FairSlots(total=limits.total, per_group=limits.per_team)
        pulls = FairSlots(total=limits.total, per_group=limits.per_team)
        self._slots = {kind: pulls if kind is HeavyKind.PULL else slots for kind in HeavyKind}
        self._counts = {kind: _Counts() for kind in HeavyKind}
        self._warned_at: dict[str, float] = {}
        """Teams whose waiting work was logged within the last `WARN_SECONDS`."""
        self._waiters: set[asyncio.Task[Any]] = set()
        # Not the shared threads of the node or the loop: hanging work would block all others.
        # Of each kind of slot twice as many: a cancelled operation leaves its thread for a while.
        self._threads = ThreadPoolExecutor(4 * limits.total, thread_name_prefix="heavy")

    @contextlib.asynccontextmanager
    async def turn(self, kind: HeavyKind, team: str, uid: str) -> AsyncGenerator[None]:
        """Wait until work of this team may run; it may until the end of the block.

        Do not hold the lock of a sandbox: other calls for it, such as its deletion, need not wait.
        """
        counts, task = self._counts[kind], asyncio.current_task()
        async with contextlib.AsyncExitStack() as held:
            since = self._clock.monotonic()
            timer = asyncio.get_running_loop().call_later(
                LONG_WAIT_SECONDS, self._log_wait, kind, team, uid
            )
            counts.waiting += 1
            if task is not None:
                self._waiters.add(task)
            try:
                await held.enter_async_context(self._slots[kind].slot(team, kind))
            finally:
                timer.cancel()
                counts.waiting -= 1
                if task is not None:
                    self._waiters.discard(task)
            self._count_wait(counts, kind, team, uid, self._clock.monotonic() - since)
            counts.running += 1
            held.callback(self._end, counts)
            yield

    def is_busy(self, team: str) -> bool:
        """Whether further work of this team would have to wait now."""
        return self._slots[HeavyKind.DUMP].would_wait(team)

    def withdraw(self, task: asyncio.Task[Any]) -> bool:
        """Cancel a task if it waits for its turn: nobody needs the result. Whether it did."""
        if task not in self._waiters:
            return False
        return task.cancel()

    async def run(self, call: Callable[_P, _T], *arguments: _P.args, **named: _P.kwargs) -> _T:
        """Run the blocking part of work that has its turn."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: call(*arguments, **named))

    def report(self) -> tuple[WorkReport, ...]:
        """Return the state of every kind."""
        return tuple(
            WorkReport(
                kind=kind,
                waiting=counts.waiting,
                running=counts.running,
                waits=tuple(counts.waits),
                waited_seconds=counts.waited_seconds,
            )
            for kind, counts in self._counts.items()
        )

    def close(self) -> None:
        """Wait for threads that still work."""
        self._threads.shutdown(wait=True)

    @staticmethod
    def _end(counts: _Counts) -> None:
        counts.running -= 1

    def _count_wait(
        self, counts: _Counts, kind: HeavyKind, team: str, uid: str, seconds: float
    ) -> None:
        counts.waits[bisect.bisect_left(WAIT_BUCKETS, seconds)] += 1
        counts.waited_seconds += seconds
        if seconds >= LONG_WAIT_SECONDS:
            log.info(
                "heavy work starts after a long wait",
                extra=fields(kind=kind, team=team, sandbox=uid, seconds=round(seconds, 1)),
            )

    def _log_wait(self, kind: HeavyKind, team: str, uid: str) -> None:
        now = self._clock.monotonic()
        recent = {one: at for one, at in self._warned_at.items() if at > now - WARN_SECONDS}
        self._warned_at = recent
        if team in recent:
            return
        recent[team] = now
        log.warning(
            "heavy work waits for its turn",
            extra=fields(
                kind=kind,
                team=team,
                sandbox=uid,
                running=self._slots[kind].running,
                waiting=self._slots[kind].waiting,
            ),
        )
