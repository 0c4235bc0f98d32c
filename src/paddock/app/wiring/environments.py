"""Wires environments: their controller, admission, and the router that sends claims to members."""

import socket
from collections.abc import Iterable
from datetime import datetime

from paddock.cache.environments import EnvSnapshots
from paddock.cache.indexes import TEMPLATE_ID
from paddock.cache.pool_members import PoolMembers
from paddock.cache.provider import Provider
from paddock.claims.quota.ledger import Dimension
from paddock.controllers.admission import gate as gates
from paddock.controllers.admission.gate import AdmissionGate
from paddock.controllers.admission.limits import Amounts, CapacityPlugin, QuotaPlugin
from paddock.controllers.admission.plugin import AdmissionContext
from paddock.controllers.env.adoption import Adoption
from paddock.controllers.env.controller import EnvController, changed_generation
from paddock.controllers.env.instance_types import known_shapes
from paddock.controllers.pool.controller import Supply
from paddock.controllers.sandbox.templates import resolve
from paddock.engine.controller import Controller, controlled_by, own_key
from paddock.engine.recorder import Recorder
from paddock.kit import ids
from paddock.kit.clock import Clock
from paddock.kit.errors import NotFoundError
from paddock.manager.environments.claims import EnvClaims
from paddock.manager.environments.follower import Apart
from paddock.manager.environments.queue import Router
from paddock.manager.federation.service import Federation
from paddock.manager.keys import Keyring
from paddock.resources import quantity
from paddock.resources.kinds.env import SandboxEnv
from paddock.resources.kinds.pool import SandboxPool
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.kinds.template import SandboxTemplate, SandboxTemplateSpec
from paddock.resources.meta import Key, controller_of
from paddock.settings import Settings

ENV_WORKERS = 4


class CachedPools:
    """Finds pools and what they are made of in the cache."""

    def __init__(self, provider: Provider) -> None:
        self._provider = provider

    def pools(self, namespace: str | None) -> Iterable[SandboxPool]:
        """Give the pools of a namespace, or of all."""
        return self._provider.pools(namespace=namespace)

    def template(self, pool: SandboxPool) -> SandboxTemplateSpec | None:
        """Give what a pool's sandboxes are made of."""
        if pool.spec.template is not None or pool.spec.template_ref is None:
            return pool.spec.template
        try:
            templates = self._provider.informer(SandboxTemplate)
            return resolve(templates, pool.spec.template_ref, pool.metadata.namespace)
        except NotFoundError:
            return None


def admission(
    settings: Settings, provider: Provider, keyring: Keyring, clock: Clock
) -> AdmissionGate:
    """Make the gate: quotas of teams, what nodes hold, and what entry points add."""
    pools = CachedPools(provider)
    held = Amounts(
        cpu_millis=quantity.millis(settings.capacity_cpu) if settings.capacity_cpu else None,
        memory_bytes=quantity.whole(settings.capacity_memory) if settings.capacity_memory else None,
    )

    def quota_of(namespace: str) -> Amounts:
        found: dict[Dimension, int] = {}
        quota = keyring.team(namespace).quota
        for limit in quota.limits if quota else ():
            found[limit.dimension] = min(limit.limit, found.get(limit.dimension, limit.limit))
        memory = found.get(Dimension.MEMORY)
        return Amounts(
            sandboxes=found.get(Dimension.COUNT),
            cpu_millis=found.get(Dimension.CPU),
            memory_bytes=None if memory is None else memory << 20,
        )

    built_in = (QuotaPlugin(pools, quota_of), CapacityPlugin(pools, lambda: held))
    return gates.load(AdmissionContext(settings, provider, clock), built_in)


class Environments:
    """Everything of environments that one control plane has."""

    def __init__(
        self,
        settings: Settings,
        provider: Provider,
        pool_members: PoolMembers,
        keyring: Keyring,
        clock: Clock,
        federation: Federation | None = None,
    ) -> None:
        self._settings = settings
        self._provider = provider
        self._pool_members = pool_members
        self._clock = clock
        self.gate = admission(settings, provider, keyring, clock)
        self.env_snapshots = EnvSnapshots()
        self.router = Router(self.env_snapshots, pool_members, clock, elsewhere=federation)
        self.claims = EnvClaims(self.router, forward=federation)

    def growth(self, pool: SandboxPool, now: datetime) -> int | None:
        """Say how much larger a pool may become; none of its own, without bound where unknown."""
        if self.env_snapshots.env_of(pool.key) is not None:
            return self.env_snapshots.growth(pool.key, now)
        owner = controller_of(pool)
        return None if owner is not None and owner.kind == SandboxEnv.KIND else 0

    def controller(self, recorder: Recorder, supply: Supply) -> Controller[Key]:
        """Make the controller of environments and let it be woken."""
        provider = self._provider
        envs = EnvController(
            provider=provider,
            pool_members=self._pool_members,
            gate=self.gate,
            env_snapshots=self.env_snapshots,
            cluster_id=self._settings.cluster_id,
            clock=self._clock,
            recorder=recorder,
            demand=self.router,
            supply=supply,
            shapes=known_shapes(self._settings.instance_types),
        )
        provider.informer(Sandbox).subscribe(envs.meter.observe)
        made: Controller[Key] = Controller("env", envs.reconcile, workers=ENV_WORKERS)
        made.watches(provider.informer(SandboxEnv), changed_generation)
        made.watches(provider.informer(SandboxPool), controlled_by(SandboxEnv))
        made.watches(provider.informer(SandboxTemplate), self._of_template)
        self.router.on_demand(made.queue.add)
        return made

    def adoption(self, recorder: Recorder) -> tuple[Controller[Key], ...]:
        """Make the controller that adopts pools, where settings ask for it."""
        if not self._settings.adopt_pools:
            return ()
        adoption = Adoption(self._provider, recorder, cluster_id=self._settings.cluster_id)
        made: Controller[Key] = Controller("adoption", adoption.reconcile, workers=1)
        made.watches(self._provider.informer(SandboxPool), own_key)
        return (made,)

    def apart(self) -> Apart:
        """Follow environments from a process that has no controllers."""
        name = self._settings.identity or f"{socket.gethostname()}-{ids.name_suffix()}"
        return Apart(
            self._provider,
            self.env_snapshots,
            self.router,
            self._settings.cluster_id,
            name,
            self._clock,
        )

    def _of_template(self, old: SandboxTemplate | None, new: SandboxTemplate | None) -> list[Key]:
        template = new or old
        if template is None or not self._provider.is_synced:
            return []
        name = template.metadata.name
        return [env.key for env in self._provider.by_index(SandboxEnv, TEMPLATE_ID, name)]
