"""What all storms on real installations share: clients who act at random until it is over."""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Generator
from typing import Any


@contextlib.contextmanager
def replayed_by(option: str) -> Generator[None]:
    """Add to a failure what deals the same again, as far as real time allows."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"to replay the choices: {option}")
        raise


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
