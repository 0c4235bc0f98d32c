"""Background cleanup of failed claims ends with its control plane."""

import asyncio

import pytest

from paddock.claims.requests import NewSandbox
from paddock.kit.clock import LoopClock
from paddock.kit.errors import PaddockError, UnavailableError
from paddock.store.memory import MemoryStore
from tests.scenario.paddock import CALLER, paddock

pytestmark = pytest.mark.looptime


async def test_cleanup_tasks_of_failed_claims_end_with_the_control_plane() -> None:
    store = MemoryStore(clock=LoopClock())
    async with paddock(pool_size=1, store=store) as world:
        update, create = store.update, store.create

        async def away(obj, **_):
            raise UnavailableError("no answer")

        store.update = store.create = away
        with pytest.raises(PaddockError):
            await world.manager.claims.create(CALLER, NewSandbox(template="base"))
        followed = [task for task in asyncio.all_tasks() if "clean up" in task.get_name()]
        assert followed
        store.update, store.create = update, create
    assert all(task.done() for task in followed)
