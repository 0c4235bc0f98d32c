"""A store with injectable faults of lists and watches."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

from paddock.store.port import Store


class FaultyStore:
    """Forwards all calls; a test can delay, repeat or fail lists and watches."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.list_errors: list[Exception] = []
        """Raised by the next lists, in order."""
        self.watch_errors: list[Exception] = []
        """Raised by the next watches when they are opened."""
        self.breaks: list[asyncio.Future[None]] = []
        self.lists = 0
        self.watches = 0
        self.delay: Callable[[], float] = lambda: 0.0
        """Seconds by which each event is late."""
        self.list_seconds = 0.0
        self.copies: Callable[[], int] = lambda: 1
        """How often each event is delivered."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def list(self, *args: Any, **kwargs: Any) -> Any:
        self.lists += 1
        if self.list_errors:
            raise self.list_errors.pop(0)
        await asyncio.sleep(self.list_seconds)
        return await self.inner.list(*args, **kwargs)

    async def watch(self, *args: Any, **kwargs: Any) -> Any:
        self.watches += 1
        if self.watch_errors:
            raise self.watch_errors.pop(0)
        broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.breaks.append(broken)
        async with aclosing(self.inner.watch(*args, **kwargs)) as events:
            while True:
                turn = asyncio.ensure_future(anext(events, None))
                try:
                    await asyncio.wait((turn, broken), return_when=asyncio.FIRST_COMPLETED)
                    if broken.done():
                        broken.result()
                        return
                    event = turn.result()
                finally:
                    turn.cancel()
                    await asyncio.gather(turn, return_exceptions=True)
                if event is None:
                    return
                if (seconds := self.delay()) > 0:
                    await asyncio.sleep(seconds)
                for _ in range(self.copies()):
                    yield event

    def break_watches(self, error: Exception | None = None) -> None:
        """End every open watch, with an error or without."""
        for broken in self.breaks:
            if not broken.done():
                if error is None:
                    broken.set_result(None)
                else:
                    broken.set_exception(error)
                    broken.exception()  # retrieved, as there may be no reader left
        self.breaks.clear()
