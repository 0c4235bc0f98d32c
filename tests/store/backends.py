"""The backends that the contract runs on.

A backend is an async context manager that returns a `Harness`. To add one, append a line to
`BACKENDS`; the suite runs on it unchanged.
"""

import itertools
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
from msgspec import Struct

from paddock.store.memory import MemoryStore
from paddock.store.port import Store
from paddock.store.sqlite import SqliteStore

_numbers = itertools.count(1)


class Harness(Struct):
    """A store and two namespaces in it that no other test uses."""

    store: Store
    namespace: str
    other_namespace: str


Backend = Callable[[Path], AbstractAsyncContextManager[Harness]]


def fresh_namespaces() -> tuple[str, str]:
    """Return unused names of namespaces, unique over all processes."""
    number = f"{os.getpid()}-{next(_numbers)}"
    return f"t{number}", f"u{number}"


@asynccontextmanager
async def memory(_: Path) -> AsyncGenerator[Harness]:
    store = MemoryStore()
    try:
        yield Harness(store, *fresh_namespaces())
    finally:
        await store.close()


@asynccontextmanager
async def sqlite(directory: Path) -> AsyncGenerator[Harness]:
    async with await SqliteStore.open(directory / "store.db") as store:
        yield Harness(store, *fresh_namespaces())


BACKENDS = [
    pytest.param(memory, id="memory"),
    pytest.param(sqlite, id="sqlite"),
]
