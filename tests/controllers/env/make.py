"""Environments for tests, and helpers to wait for their state."""

import asyncio

from msgspec import structs

from paddock.resources.kinds.env import (
    Autoscaling,
    EnvCluster,
    EnvMember,
    MemberConfig,
    ObservedMember,
    SandboxEnv,
    SandboxEnvSpec,
    ScalingGroup,
)
from paddock.resources.kinds.pool import SandboxPool
from paddock.resources.kinds.template import TemplateRef
from paddock.resources.meta import Key, ObjectMeta
from tests.scenario.paddock import World

NAME = "agents"
ENV = Key("default", NAME)


def member(replicas: int | None = None, **config) -> EnvMember:
    return EnvMember(replicas=replicas, config=MemberConfig(**config))


def environment(
    members: dict[str, EnvMember],
    *,
    group: ScalingGroup | None = None,
    cluster: str = "local",
    name: str = NAME,
    template: str = "base",
    **spec,
) -> SandboxEnv:
    groups = {} if group is None else {"default": group}
    return SandboxEnv(
        metadata=ObjectMeta(name=name, namespace="default"),
        spec=SandboxEnvSpec(
            template_ref=TemplateRef(name=template),
            clusters={cluster: EnvCluster(members=members)},
            autoscaling=Autoscaling(groups=groups),
            **spec,
        ),
    )


def found(world: World, key: Key = ENV) -> SandboxEnv:
    env = world.provider.get(SandboxEnv, key)
    assert env is not None
    return env


def seen(world: World, name: str, key: Key = ENV) -> ObservedMember | None:
    for cluster in found(world, key).status.clusters:
        for item in cluster.observed_members:
            if cluster.is_local and item.name == name:
                return item
    return None


def pool(world: World, name: str) -> SandboxPool | None:
    return world.provider.get(SandboxPool, Key("default", name))


async def idle(world: World, name: str, count: int, *, seconds: float = 60) -> None:
    key = Key("default", name)
    async with asyncio.timeout(seconds):
        while len(world.plane.pool_members.members(key).available) != count:
            # Virtual seconds cost real work: do not poll more often than needed.
            await asyncio.sleep(0.25)


async def change_members(world: World, members: dict[str, EnvMember], key: Key = ENV) -> None:
    def change(env: SandboxEnv) -> SandboxEnv:
        clusters = {**env.spec.clusters, "local": EnvCluster(members=members)}
        return structs.replace(env, spec=structs.replace(env.spec, clusters=clusters))

    await world.provider.write.mutate(SandboxEnv, key, change)
