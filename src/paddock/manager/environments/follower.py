"""Environments in a process that serves claims but runs no controllers.

It reads members from the status of environments, and writes the number of its queued claims there,
so that the autoscaler in the controllers process counts them.
"""

import asyncio
import logging
from datetime import datetime, timedelta

from msgspec import structs

from paddock.cache.environments import EnvSnapshot, EnvSnapshots, MemberSnapshot
from paddock.cache.provider import Provider
from paddock.kit.clock import Clock
from paddock.kit.errors import NotFoundError, PaddockError
from paddock.kit.logs import fields
from paddock.manager.environments.queue import ClaimQueue
from paddock.resources.kinds.env import MemberState, ObservedQueue, SandboxEnv, SandboxEnvStatus
from paddock.resources.meta import Key

log = logging.getLogger(__name__)

GATHER_SECONDS = 0.1
REFRESH_SECONDS = 10.0
FORGET_SECONDS = 60.0
"""Counts of a process that has not reported for this long are removed."""


class EnvironmentFollower:
    """Follows environments by their status, and reports its own queue there."""

    def __init__(
        self,
        provider: Provider,
        env_snapshots: EnvSnapshots,
        queue: ClaimQueue,
        cluster: str,
        name: str,
        clock: Clock,
    ) -> None:
        self._provider = provider
        self._env_snapshots = env_snapshots
        self._queue = queue
        self._cluster = cluster
        self._name = name
        self._clock = clock
        self._changed: set[Key] = set()
        self._reported: dict[Key, datetime] = {}
        self._wake = asyncio.Event()
        provider.informer(SandboxEnv).subscribe(self._observe)
        queue.on_demand(self._mark)

    def _observe(self, old: SandboxEnv | None, new: SandboxEnv | None) -> None:
        if new is not None:
            self._env_snapshots.put(snapshot_of(new, self._cluster, self._clock.now()))
        elif old is not None:
            self._env_snapshots.drop(old.key)

    def _mark(self, env: Key) -> None:
        self._changed.add(env)
        self._wake.set()

    async def run(self) -> None:
        """Report the queue length on changes and every `REFRESH_SECONDS`, until cancelled."""
        for env in self._provider.envs():
            self._observe(None, env)
        while True:
            try:
                async with asyncio.timeout(REFRESH_SECONDS):
                    await self._wake.wait()
            except TimeoutError:
                self._changed.update(self._reported)
            await asyncio.sleep(GATHER_SECONDS)
            self._wake.clear()
            changed, self._changed = self._changed, set()
            for env in changed:
                try:
                    await self._report(env)
                except NotFoundError:
                    self._reported.pop(env, None)
                except PaddockError as error:
                    # The store is unavailable: reported again with the next change or refresh.
                    log.warning(
                        "queue length was not reported",
                        extra=fields(env=env, cause=str(error)),
                    )
                    self._reported.setdefault(env, self._clock.now())

    async def _report(self, env: Key) -> None:
        waiting, now = self._queue.waiting(env), self._clock.now()
        own: tuple[ObservedQueue, ...] = ()
        if waiting.total:
            own = (
                ObservedQueue(
                    name=self._name, waiting=waiting.anywhere, pinned=waiting.pinned, time=now
                ),
            )
            self._reported[env] = now
        elif self._reported.pop(env, None) is None:
            return
        limit = now - timedelta(seconds=FORGET_SECONDS)

        def change(found: SandboxEnv) -> SandboxEnv:
            others = tuple(
                item
                for item in found.status.queues
                if item.name != self._name and item.time is not None and item.time > limit
            )
            status: SandboxEnvStatus = structs.replace(found.status, queues=(*others, *own))
            return structs.replace(found, status=status)

        await self._provider.write.mutate(SandboxEnv, env, change, is_status=True)


def snapshot_of(env: SandboxEnv, cluster: str, now: datetime) -> EnvSnapshot:
    """Return the members of this cluster as the controllers reported them."""
    found = next((item for item in env.status.clusters if item.cluster_id == cluster), None)
    members = found.observed_members if found is not None else ()
    return EnvSnapshot(
        env=env.key,
        cluster=cluster,
        taken_at=(found.last_snapshot_time if found is not None else None) or now,
        members=tuple(
            MemberSnapshot(
                name=member.name,
                pool=Key(env.metadata.namespace, member.pool),
                priority=member.priority,
                scaling_group=member.scaling_group,
                idle=member.idle,
                pending=max(member.desired - member.running - member.idle, 0),
                headroom=member.scale_up_headroom,
                saturated_until=member.saturated_until,
            )
            for member in members
            if member.pool and member.state is not MemberState.MISSING
        ),
    )
