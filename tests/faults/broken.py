"""A store and a runtime that fail at random, from a seed, as one control plane sees them.

Each control plane has its own pair over the shared real store and runtime. A severed pair lets
nothing through in either direction, as after kill -9: requests in flight continue at the store or
the node, and their replies are lost.
"""

import asyncio
import random
from collections import Counter
from contextlib import aclosing
from typing import Any

from msgspec import Struct

from paddock.kit.errors import ConflictError, GoneError, UnavailableError
from paddock.resources import codec
from paddock.resources.meta import Resource
from paddock.runtime.simulated import SimulatedRuntime
from paddock.store.memory import MemoryStore
from tests.faults.virtual import Trace, outside


class Rates(Struct, frozen=True, kw_only=True):
    """Probability of each fault, from 0 to 1."""

    conflict: float = 0.0
    refused: float = 0.0
    delay: float = 0.0
    lost_reply: float = 0.0
    watch_breaks: float = 0.0
    """Per event: the stream ends, disconnected or as too old."""
    runtime_refused: float = 0.0
    runtime_lost_reply: float = 0.0
    delay_seconds: float = 1.0


CALM = Rates()
ROUGH = Rates(
    conflict=0.06,
    refused=0.04,
    delay=0.12,
    lost_reply=0.06,
    watch_breaks=0.02,
    runtime_refused=0.04,
    runtime_lost_reply=0.03,
)

A_MOMENT = 0.004
"""Maximum latency of a call in seconds, each way."""
_WRITES = ("create", "update", "update_status", "delete")
_READS = ("get", "list")
_QUIET = ("watch", "instances", "checkpoints", "inspect", "usage", "logs", "capabilities")
"""Calls of the runtime that change nothing."""


class Faults:
    """The random source of both ports of a world, and its history."""

    def __init__(self, seed: int, trace: Trace) -> None:
        self.dice = random.Random(seed)
        self.trace = trace
        self.rates = CALM
        self.is_full = False
        """Whether the disk is full: the store reads and does not write."""
        self.moving = {"store": asyncio.Event(), "node": asyncio.Event()}
        """Cleared: that side is stopped, and its callers wait."""
        self.end_faults()
        self.seen: Counter[str] = Counter()

    def end_faults(self) -> None:
        """End all lasting faults."""
        self.rates, self.is_full = CALM, False
        for event in self.moving.values():
            event.set()

    def draw(self, what: str, rate: float) -> bool:
        if rate and self.dice.random() < rate:
            self.seen[what] += 1
            self.trace.add("fault:", what)
            return True
        return False


class _Severable:
    SIDE = ""

    def __init__(self, faults: Faults, who: str) -> None:
        self.is_severed = False
        self._faults = faults
        self._who = who

    async def _delay(self) -> None:
        """Delay, as between two processes: orders differ by the seed."""
        await asyncio.sleep(self._faults.dice.random() * A_MOMENT)
        await self._faults.moving[self.SIDE].wait()

    def _alive(self) -> None:
        if self.is_severed:
            # The process was killed: all of its code that still runs ends here.
            raise asyncio.CancelledError("the control plane was killed")


class BrokenStore(_Severable):
    """A Store over another: conflicts, refusals, delays, lost replies, broken watches, no room."""

    SIDE = "store"

    def __init__(self, inner: MemoryStore, faults: Faults, who: str) -> None:
        super().__init__(faults, who)
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._inner, name)
        if name not in _WRITES and name not in _READS:
            return real

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await self._call(name, real, *args, **kwargs)

        return call

    async def _call(self, name: str, real: Any, *args: Any, **kwargs: Any) -> Any:
        self._alive()
        draw, rates = self._faults.draw, self._faults.rates
        if draw("refused", rates.refused):
            raise UnavailableError("the store is busy")
        if name in _WRITES and name != "create" and draw("conflict", rates.conflict):
            raise ConflictError("somebody was first")
        if draw("delay", rates.delay):
            await asyncio.sleep(self._faults.dice.random() * rates.delay_seconds)
        await self._delay()
        self._alive()
        self._faults.trace.add(self._who, name, *map(_traced, args), kwargs or "")
        if name in _WRITES and self._faults.is_full:
            self._faults.seen["no room"] += 1
            raise UnavailableError("the store has no room")
        done = await real(*args, **kwargs)
        await self._delay()
        self._alive()
        if name in _WRITES and draw("lost reply", rates.lost_reply):
            raise UnavailableError("the reply was lost")
        return done

    async def watch(self, *args: Any, **kwargs: Any) -> Any:
        self._alive()
        async with aclosing(self._inner.watch(*args, **kwargs)) as events:
            async for event in events:
                self._alive()
                if self._faults.draw("watch ended", self._faults.rates.watch_breaks):
                    errors = (GoneError("too old"), UnavailableError("disconnected"), None)
                    error = self._faults.dice.choice(errors)
                    if error is None:
                        return
                    raise error
                await self._delay()
                self._alive()
                yield event


class BrokenRuntime(_Severable):
    """A Runtime over another: refusals and lost replies. A request is performed even if its caller
    is killed meanwhile, as by a node in its own process.
    """

    SIDE = "node"

    def __init__(self, inner: SimulatedRuntime, faults: Faults, who: str) -> None:
        super().__init__(faults, who)
        self._inner = inner

    @property
    def name(self) -> str:
        return self._inner.name

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._inner, name)
        if name == "watch":
            return real

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await self._call(name, real, *args, **kwargs)

        return call

    async def _call(self, name: str, real: Any, *args: Any, **kwargs: Any) -> Any:
        self._alive()
        draw, rates = self._faults.draw, self._faults.rates
        if draw("runtime refused", rates.runtime_refused):
            raise UnavailableError("the node is busy", retry_after_seconds=0.1)
        await self._delay()
        self._alive()
        self._faults.trace.add(self._who, "asks the node to", name, *map(_traced, args))
        task = asyncio.get_running_loop().create_task(real(*args, **kwargs), context=outside())
        task.add_done_callback(_retrieve)
        done = await asyncio.shield(task)
        self._alive()
        if name not in _QUIET and draw("runtime lost reply", rates.runtime_lost_reply):
            raise UnavailableError("the reply of the node was lost")
        return done


def _traced(argument: object) -> str:
    """Trace a request, in full where a replay could differ."""
    if isinstance(argument, Resource):
        return f"{argument.KIND} {codec.encode(argument).decode()}"
    return argument.__name__ if isinstance(argument, type) else str(argument)


def _retrieve(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()  # Retrieve the result: the caller may be gone.
