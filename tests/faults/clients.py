"""Shared parts of storms on real installations: random clients, a counting command."""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Generator
from typing import Any

import pytest

from tests.installation import Box, Installation
from tests.runtime.local.nodes import eventually

COUNTED = "/home/user/counted"
_COUNT = (
    f"mkdir {COUNTED}.begun 2>/dev/null || exit 0;"
    f" i=0; while :; do i=$((i+1)); echo $$ $i >>{COUNTED}; sleep 0.5; done"
)
"""Started once, however often it is requested: a lost reply may be repeated."""


def seed_of(request: pytest.FixtureRequest) -> int:
    """Return the seed of the choices on real time."""
    return int(request.config.getoption("--faults-seed"))


@contextlib.contextmanager
def replayed_by(option: str) -> Generator[None]:
    """Add to a failure how to repeat it, as far as real time allows."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"to replay the choices: {option}")
        raise


class CountingCommand:
    """A command in one sandbox that counts, and must stay the same process."""

    def __init__(self, paddock: Installation, box: Box) -> None:
        self._paddock = paddock
        self._box = box
        self._pid = ""
        self._seen = 0

    async def begin(self) -> None:
        """Start it, disconnect, and check that it counts."""

        async def has_started() -> bool:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    await self._paddock.run(self._box, _COUNT)
            return not await self.problem_of() and self._seen > 0

        await eventually(has_started)

    async def problem_of(self) -> str:
        """Read its count; return the problem, if any."""
        said = await self._paddock.run(self._box, f"cat {COUNTED} 2>/dev/null; true")
        # If the disk was full in the middle of a line, that line does not count.
        lines = [line.split() for line in said.splitlines() if len(line.split()) == 2]
        pids, numbers = {pid for pid, _ in lines}, [int(number) for _, number in lines]
        self._pid = self._pid or next(iter(pids), "")
        if pids - {self._pid}:
            return f"what counts in {self._box.id} is another process: {pids}, not {self._pid}"
        if numbers != sorted(set(numbers)) or (numbers or [0])[-1] < self._seen:
            return f"what counts in {self._box.id} has begun anew: {numbers[-5:]}, {self._seen}"
        self._seen = (numbers or [0])[-1]
        return ""

    async def keeps_counting(self, *, seconds: float = 30) -> str:
        """Wait until it has counted further; return the problem if it does not."""
        before = self._seen

        async def is_further() -> str | bool:
            return await self.problem_of() or self._seen > before

        try:
            said = await eventually(is_further, seconds=seconds, pause=0.2)
        except AssertionError:
            return f"what counts in {self._box.id} stands still at {before}"
        return said if isinstance(said, str) else ""


Action = Callable[[random.Random, list[Any]], Awaitable[None]]


class Clients:
    """Several concurrent clients, each with its own random source and sandboxes."""

    TROUBLE: tuple[type[Exception], ...] = ()
    """Errors that a client may see while the other side is down; it continues."""
    PATIENCE_SECONDS = 30.0
    REST_SECONDS = 0.1

    def __init__(self, seed: int, *, count: int) -> None:
        self.did: Counter[str] = Counter()
        """Number of answers per action, and of failures: `trouble`."""
        self.is_over = False
        self._seed = seed
        self._count = count

    def choose(self, dice: random.Random, mine: list[Any]) -> Action:
        """Pick a client's next action on its own sandboxes."""
        raise NotImplementedError

    @property
    def acknowledged(self) -> int:
        """Number of answered actions."""
        return self.did.total() - self.did["trouble"]

    async def run(self) -> None:
        """Run every client until the storm is over."""
        async with asyncio.TaskGroup() as tasks:
            for number in range(self._count):
                dice = random.Random(self._seed * 100 + number)
                tasks.create_task(self._client(dice), name=f"client {number}")

    async def _client(self, dice: random.Random) -> None:
        mine: list[Any] = []
        while not self.is_over:
            action = self.choose(dice, mine)
            try:
                async with asyncio.timeout(self.PATIENCE_SECONDS):
                    await action(dice, mine)
                self.did[getattr(action, "__name__", "").lstrip("_")] += 1
            except self.TROUBLE:
                self.did["trouble"] += 1
                await asyncio.sleep(self.REST_SECONDS)
            await asyncio.sleep(dice.random() * self.REST_SECONDS)
