"""Batches and pools for tests."""

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from msgspec import structs

from paddock.controllers.batch.tasks.simulated import SimulatedTasks
from paddock.resources.kinds.batch import (
    BatchSandbox,
    BatchSandboxSpec,
    Process,
    TaskSpec,
    TaskTemplate,
)
from paddock.resources.kinds.pool import Capacity, SandboxPool, SandboxPoolSpec
from paddock.resources.kinds.template import SandboxTemplateSpec
from paddock.resources.meta import Key, ObjectMeta
from tests.scenario.paddock import World, paddock


def task(*command: str, **more: Any) -> TaskTemplate:
    return TaskTemplate(spec=TaskSpec(process=Process(command=command), **more))


def batch(name: str, replicas: int, *, namespace: str = "default", **spec: Any) -> BatchSandbox:
    meta = ObjectMeta(
        name=name,
        namespace=namespace,
        labels=spec.pop("labels", {}),
        annotations=spec.pop("annotations", {}),
    )
    return BatchSandbox(metadata=meta, spec=BatchSandboxSpec(replicas=replicas, **spec))


def pool(name: str, *, buffer: int = 0, most: int = 1000, **spec: Any) -> SandboxPool:
    capacity = Capacity(buffer_min=buffer, buffer_max=buffer, pool_min=0, pool_max=most)
    spec.setdefault("template", SandboxTemplateSpec())
    return SandboxPool(
        metadata=ObjectMeta(
            name=name,
            namespace=spec.pop("namespace", "default"),
            labels=spec.pop("pool_labels", {}),
        ),
        spec=SandboxPoolSpec(capacity=capacity, **spec),
    )


class Batches:
    """Helpers for the batches of a world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.write = world.provider.write

    async def create(self, *objects: Any) -> None:
        for obj in objects:
            await self.write.create(obj)

    def get(self, name: str, namespace: str = "default") -> BatchSandbox:
        found = self.world.provider.get(BatchSandbox, Key(namespace, name))
        assert found is not None, f"batch {name} is gone"
        return found

    def is_gone(self, name: str) -> bool:
        return self.world.provider.get(BatchSandbox, Key("default", name)) is None

    def held(self, name: str, namespace: str = "default") -> dict[int, str]:
        allocations = self.get(name, namespace).status.allocations
        return {item.shard: item.uid for item in allocations if item.sandbox}

    async def ready(self, name: str, count: int | None = None, namespace: str = "default") -> None:
        wanted = self.get(name, namespace).spec.replicas if count is None else count
        await self.world.until(lambda: self.get(name, namespace).status.ready == wanted)

    async def change(self, name: str, **spec: Any) -> None:
        await self.write.mutate(
            BatchSandbox,
            Key("default", name),
            lambda old: structs.replace(old, spec=structs.replace(old.spec, **spec)),
        )

    async def delete(self, name: str) -> None:
        await self.write.delete(self.get(name))
        await self.world.until(lambda: self.is_gone(name))

    def pool_status(self, name: str):
        return self.world.pool(name).status

    def allocated(self, name: str) -> int:
        return len(self.world.plane.pool_members.members(Key("default", name)).allocated)


@contextlib.asynccontextmanager
async def batching() -> AsyncGenerator[tuple[World, Batches]]:
    """Run a world without default pools; yield it and its helpers."""
    async with paddock(pool_size=0) as world:
        yield world, Batches(world)
        runner = world.plane.batches.task_watcher._runner
        assert isinstance(runner, SimulatedTasks)
        runner.close()
