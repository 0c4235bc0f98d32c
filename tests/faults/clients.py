"""What all storms on real installations share: clients who act at random until it is over, a
command that counts meanwhile, and the seed of their choices."""

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
"""Begun once, however often it is asked for: an answer that was lost may be asked for again."""


def seed_of(request: pytest.FixtureRequest) -> int:
    """Give the seed of the choices on real time."""
    return int(request.config.getoption("--faults-seed"))


@contextlib.contextmanager
def replayed_by(option: str) -> Generator[None]:
    """Add to a failure what deals the same again, as far as real time allows."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"to replay the choices: {option}")
        raise


class Counting:
    """A command of one sandbox that counts, and must be the same process ever after."""

    def __init__(self, paddock: Installation, box: Box) -> None:
        self._paddock = paddock
        self._box = box
        self._pid = ""
        self._seen = 0

    async def begin(self) -> None:
        """Begin, hang up, and see it count."""

        async def has_begun() -> bool:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    await self._paddock.run(self._box, _COUNT)
            return not await self.complaint() and self._seen > 0

        await eventually(has_begun)

    async def complaint(self) -> str:
        """Read how far it is; says what is wrong with it, if anything is."""
        said = await self._paddock.run(self._box, f"cat {COUNTED} 2>/dev/null; true")
        # Where a disk was full in the middle of a line, that line is none.
        lines = [line.split() for line in said.splitlines() if len(line.split()) == 2]
        pids, numbers = {pid for pid, _ in lines}, [int(number) for _, number in lines]
        self._pid = self._pid or next(iter(pids), "")
        if pids - {self._pid}:
            return f"what counts in {self._box.id} is another process: {pids}, not {self._pid}"
        if numbers != sorted(set(numbers)) or (numbers or [0])[-1] < self._seen:
            return f"what counts in {self._box.id} has begun anew: {numbers[-5:]}, {self._seen}"
        self._seen = (numbers or [0])[-1]
        return ""

    async def goes_on(self, *, seconds: float = 30) -> str:
        """Wait until it has counted on; says what is wrong if it does not."""
        before = self._seen

        async def is_further() -> str | bool:
            return await self.complaint() or self._seen > before

        try:
            said = await eventually(is_further, seconds=seconds, pause=0.2)
        except AssertionError:
            return f"what counts in {self._box.id} stands still at {before}"
        return said if isinstance(said, str) else ""


Action = Callable[[random.Random, list[Any]], Awaitable[None]]


class Clients:
    """Several clients at once, each with its own dice and its own sandboxes."""

    TROUBLE: tuple[type[Exception], ...] = ()
    """What a client may see while the other side is dead; it goes on."""
    PATIENCE_SECONDS = 30.0
    REST_SECONDS = 0.1

    def __init__(self, seed: int, *, count: int) -> None:
        self.did: Counter[str] = Counter()
        """How often each action was answered, and how many were not: `trouble`."""
        self.is_over = False
        self._seed = seed
        self._count = count

    def choose(self, dice: random.Random, mine: list[Any]) -> Action:
        """Pick what a client does next with the sandboxes that are its own."""
        raise NotImplementedError

    @property
    def acknowledged(self) -> int:
        """How many actions were answered."""
        return self.did.total() - self.did["trouble"]

    async def run(self) -> None:
        """Let every client act until somebody says that it is over."""
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
