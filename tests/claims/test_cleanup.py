"""What goes on beside requests ends with its process."""

import asyncio

import pytest

from paddock.claims.requests import NewSandbox
from paddock.kit.clock import LoopClock
from paddock.kit.errors import PaddockError, UnavailableError
from paddock.store.memory import MemoryStore
from tests.scenario.paddock import CALLER, paddock

pytestmark = pytest.mark.looptime


async def test_a_control_plane_that_stops_leaves_no_task_that_follows_a_failed_claim() -> None:
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
