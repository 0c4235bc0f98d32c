"""Creates an environment for each pool without an owner, if the operator enables it.

Three idempotent steps: create the environment from the pool; add the pool as its member; set the
environment as the pool's owner. From then on the environment manages the pool. The pool's spec is
copied into the member, so its sandboxes do not change; its idle sandboxes become the group's
minimum, and it grows with demand.
"""

from msgspec import structs

from paddock.cache.provider import Provider
from paddock.controllers.env.render import size_of
from paddock.engine.controller import Done, Result
from paddock.engine.recorder import Recorder
from paddock.kit.errors import AlreadyExistsError, NotFoundError
from paddock.resources.kinds.env import (
    Autoscaling,
    EnvCluster,
    EnvMember,
    MemberConfig,
    MemberMetadata,
    SandboxEnv,
    SandboxEnvSpec,
    ScalingGroup,
)
from paddock.resources.kinds.pool import SandboxPool
from paddock.resources.kinds.template import TemplateRef
from paddock.resources.meta import Key, ObjectMeta, controller_of, owner_reference, with_meta


class Adoption:
    """Adopts pools without an owner."""

    def __init__(self, provider: Provider, recorder: Recorder, *, cluster_id: str) -> None:
        self._provider = provider
        self._recorder = recorder
        self._cluster = cluster_id

    async def reconcile(self, key: Key) -> Result:
        """Adopt one pool if it has no owner."""
        pool = self._provider.get(SandboxPool, key)
        if pool is None or pool.is_deleting or not self.is_orphan(pool):
            return Done()
        env = await self._environment(pool)
        if env.is_deleting:
            # Its deletion would delete the pool too: wait until it is gone.
            return Done()
        env = await self._member(env, pool)
        await self._own(env, pool)
        message = f"pool {key.name} was adopted by environment {env.metadata.name}"
        self._recorder.normal(pool, "Adopted", message)
        return Done(message)

    def is_orphan(self, pool: SandboxPool) -> bool:
        """Whether a pool has no owner, or an environment of its name that no longer exists."""
        owner = controller_of(pool)
        if owner is None:
            return True
        if owner.kind != SandboxEnv.KIND or owner.name != pool.metadata.name:
            return False
        env = self._provider.get(SandboxEnv, pool.key)
        return env is None or env.metadata.uid != owner.uid

    async def _environment(self, pool: SandboxPool) -> SandboxEnv:
        known = self._provider.get(SandboxEnv, pool.key)
        if known is not None:
            return known
        try:
            return await self._provider.write.create(environment_for(pool, self._cluster))
        except AlreadyExistsError:
            return await self._provider.live.get(SandboxEnv, pool.key)

    async def _member(self, env: SandboxEnv, pool: SandboxPool) -> SandboxEnv:
        name = pool.metadata.name

        def change(found: SandboxEnv) -> SandboxEnv | None:
            segment = found.spec.clusters.get(self._cluster) or EnvCluster()
            if name in segment.members:
                return None
            members = {**segment.members, name: member_for(pool)}
            clusters = {**found.spec.clusters, self._cluster: EnvCluster(members=members)}
            return structs.replace(found, spec=structs.replace(found.spec, clusters=clusters))

        return await self._provider.write.mutate(SandboxEnv, env.key, change, uid=env.metadata.uid)

    async def _own(self, env: SandboxEnv, pool: SandboxPool) -> None:
        def change(found: SandboxPool) -> SandboxPool | None:
            if found.is_deleting or not self.is_orphan(found):
                return None
            return with_meta(found, owner_references=(owner_reference(env),))

        try:
            await self._provider.write.mutate(SandboxPool, pool.key, change, uid=pool.metadata.uid)
        except NotFoundError:
            return


def member_for(pool: SandboxPool) -> EnvMember:
    """Return a member with the spec of a pool."""
    capacity = pool.spec.capacity
    return EnvMember(
        metadata=MemberMetadata(labels=pool.metadata.labels, annotations=pool.metadata.annotations),
        spec=pool.spec,
        replicas=max(size_of(pool), 0)
        if capacity is None
        else max(pool.status.total, _least(pool)),
        config=MemberConfig(max_replicas=None if capacity is None else capacity.pool_max),
    )


def environment_for(pool: SandboxPool, cluster: str) -> SandboxEnv:
    """Return an environment whose only member is this pool."""
    name = pool.metadata.name
    group = ScalingGroup(min_replicas=_least(pool))
    return SandboxEnv(
        metadata=ObjectMeta(name=name, namespace=pool.metadata.namespace),
        spec=SandboxEnvSpec(
            template_ref=pool.spec.template_ref or TemplateRef(name=name),
            clusters={cluster: EnvCluster(members={name: member_for(pool)})},
            autoscaling=Autoscaling(groups={"default": group}),
        ),
    )


def _least(pool: SandboxPool) -> int:
    capacity = pool.spec.capacity
    if capacity is not None:
        return max(capacity.buffer_min, capacity.pool_min)
    return pool.spec.replicas or 0
