"""A sandbox and its template applied together: their watches are not ordered."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest

from paddock.kit.clock import LoopClock
from paddock.kit.errors import DeadlineExceededError
from paddock.resources.kinds.sandbox import Phase, Sandbox, SandboxSpec
from paddock.resources.kinds.template import SandboxTemplate, SandboxTemplateSpec, TemplateRef
from paddock.resources.meta import Key, ObjectMeta
from paddock.runtime.simulated import SimulatedRuntime
from paddock.store.memory import MemoryStore
from tests.scenario.paddock import World, paddock

pytestmark = pytest.mark.looptime

KEY = Key("default", "box")


class LateTemplates(MemoryStore):
    """A store whose watch of templates is much slower than the others."""

    def __init__(self, clock: LoopClock) -> None:
        super().__init__(clock=clock)
        self.is_mute = False

    async def watch(self, kind: Any, **options: Any) -> AsyncGenerator[Any]:
        async with aclosing(super().watch(kind, **options)) as events:
            async for event in events:
                if kind is SandboxTemplate:
                    await asyncio.sleep(1000)
                yield event

    async def get(self, kind: Any, key: Key) -> Any:
        if self.is_mute and kind is SandboxTemplate:
            raise DeadlineExceededError("no answer in time")
        return await super().get(kind, key)


async def declared(world: World) -> None:
    meta = ObjectMeta(name=KEY.name, namespace=KEY.namespace)
    spec = SandboxSpec(template_ref=TemplateRef(name="new"))
    await world.store.create(Sandbox(metadata=meta, spec=spec))


def phase(world: World) -> Phase | None:
    found = world.provider.sandbox(KEY)
    return None if found is None else found.status.phase


async def test_a_template_that_is_not_in_the_cache_yet_is_found() -> None:
    clock = LoopClock()
    store, runtime = LateTemplates(clock), SimulatedRuntime(clock=clock)
    async with paddock(pool_size=0, store=store, runtime=runtime, clock=clock) as world:
        meta = ObjectMeta(name="new", namespace="default")
        await store.create(SandboxTemplate(metadata=meta, spec=SandboxTemplateSpec()))
        store.is_mute = True
        await declared(world)
        await asyncio.sleep(5)
        assert phase(world) is Phase.PENDING, "a store that does not answer is asked again"
        store.is_mute = False
        await world.until(lambda: phase(world) is Phase.RUNNING)
        assert world.provider.get(SandboxTemplate, Key("default", "new")) is not None


async def test_a_template_that_does_not_exist_fails_its_sandbox() -> None:
    clock = LoopClock()
    store, runtime = LateTemplates(clock), SimulatedRuntime(clock=clock)
    async with paddock(pool_size=0, store=store, runtime=runtime, clock=clock) as world:
        await declared(world)
        await world.until(lambda: phase(world) is Phase.FAILED)
        found = world.provider.sandbox(KEY)
        assert found is not None
        assert "SandboxTemplate default/new was not found" in found.status.message
