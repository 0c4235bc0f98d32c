"""Events of sandboxes whose processes were killed for lack of memory."""

import asyncio

import pytest

from paddock.claims.requests import NewSandbox
from paddock.resources.kinds.builtin import Event
from paddock.resources.kinds.sandbox import Phase
from tests.scenario.paddock import CALLER, paddock

pytestmark = pytest.mark.looptime

CAUSE = "the sandbox used its 1 GiB of memory"


async def test_kills_for_lack_of_memory_are_one_event_with_a_count() -> None:
    async with paddock() as world:
        sandbox = await world.manager.claims.create(CALLER, NewSandbox(template="base"))
        for _ in range(3):
            world.runtime.kill_for_memory(sandbox.metadata.uid, f"processes were killed: {CAUSE}")
        found: list[Event] = []

        async def events() -> list[Event]:
            listed = await world.store.list(Event)
            return [item for item in listed.items if item.reason == "OutOfMemory"]

        for _ in range(20):
            found = await events()
            if found and found[0].count == 3:
                break
            await asyncio.sleep(1)
        [event] = found
        assert (event.type, event.count) == ("Warning", 3)
        assert event.message == f"processes were killed: {CAUSE}"
        assert event.involved_object.name == sandbox.metadata.name
        current = world.provider.sandbox(sandbox.key)
        assert current is not None
        assert current.status.phase is Phase.RUNNING


async def test_the_status_of_a_sandbox_that_ran_out_of_memory_has_the_cause() -> None:
    async with paddock() as world:
        sandbox = await world.manager.claims.create(CALLER, NewSandbox(template="base"))
        world.runtime.crash(sandbox.metadata.uid, f"its init was killed: {CAUSE}")

        def message() -> str:
            current = world.provider.sandbox(sandbox.key)
            return current.status.message if current is not None else ""

        await world.until(lambda: CAUSE in message())
