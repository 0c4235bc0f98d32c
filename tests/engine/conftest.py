from collections.abc import AsyncIterator

import pytest

from paddock.kit.clock import LoopClock
from paddock.store.memory import MemoryStore
from tests.engine.faults import FaultyStore


@pytest.fixture
async def store() -> AsyncIterator[FaultyStore]:
    inner = MemoryStore(clock=LoopClock())
    yield FaultyStore(inner)
    await inner.close()
