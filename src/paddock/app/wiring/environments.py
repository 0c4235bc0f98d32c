"""Creates the parts of environments: controller, admission, and the claim_queue of claims."""

import socket
from collections.abc import Iterable
from datetime import datetime

from paddock.cache.environments import EnvSnapshots
from paddock.cache.pool_members import PoolMembers
from paddock.cache.provider import Provider
from paddock.claims.quota.ledger import Dimension
from paddock.controllers.admission import gate as gates
from paddock.controllers.admission.gate import AdmissionGate
from paddock.controllers.admission.limits import Amounts, CapacityPlugin, QuotaPlugin
from paddock.controllers.admission.plugin import AdmissionContext
from paddock.controllers.env import events as env_events
from paddock.controllers.env.adoption import Adoption
from paddock.controllers.env.controller import EnvController
from paddock.controllers.env.instance_types import load_instance_types
from paddock.controllers.pool.controller import Supply
from paddock.controllers.sandbox.templates import resolve
from paddock.engine.controller import Controller
from paddock.engine.recorder import Recorder
from paddock.kit import ids
from paddock.kit.clock import Clock
from paddock.kit.errors import NotFoundError
from paddock.manager.environments.claims import EnvironmentClaims
from paddock.manager.environments.follower import EnvironmentFollower
from paddock.manager.environments.queue import ClaimQueue
from paddock.manager.federation.service import Federation
from paddock.manager.keys import Keyring
from paddock.resources import quantity
from paddock.resources.kinds.env import SandboxEnv
from paddock.resources.kinds.pool import SandboxPool
from paddock.resources.kinds.template import SandboxTemplate, SandboxTemplateSpec
from paddock.resources.meta import Key, controller_of
from paddock.settings import Settings

ENV_WORKERS = 4


class CachedPools:
    """Finds pools and their templates in the cache."""

    def __init__(self, provider: Provider) -> None:
        self._provider = provider

    def pools(self, namespace: str | None) -> Iterable[SandboxPool]:
        """Return the pools of a namespace, or all."""
        return self._provider.pools(namespace=namespace)

    def template(self, pool: SandboxPool) -> SandboxTemplateSpec | None:
        """Return the template of a pool's sandboxes."""
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
    """Create the gate: team quotas, node capacity, and third-party plugins."""
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
    """The environment parts of one control plane."""

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
        self.claim_queue = ClaimQueue(self.env_snapshots, pool_members, clock, elsewhere=federation)
        self.claims = EnvironmentClaims(self.claim_queue, forward=federation)

    def growth(self, pool: SandboxPool, now: datetime) -> int | None:
        """Return how much a pool may grow; `None` means unlimited, 0 without an environment."""
        if self.env_snapshots.env_of(pool.key) is not None:
            return self.env_snapshots.growth(pool.key, now)
        owner = controller_of(pool)
        return None if owner is not None and owner.kind == SandboxEnv.KIND else 0

    def controller(self, recorder: Recorder, supply: Supply) -> Controller[Key]:
        """Create the controller of environments and subscribe it."""
        provider = self._provider
        envs = EnvController(
            provider=provider,
            pool_members=self._pool_members,
            gate=self.gate,
            env_snapshots=self.env_snapshots,
            cluster_id=self._settings.cluster_id,
            clock=self._clock,
            recorder=recorder,
            demand=self.claim_queue,
            supply=supply,
            instance_types=load_instance_types(self._settings.instance_types),
        )
        controller = Controller("env", envs.reconcile, workers=ENV_WORKERS)
        env_events.subscribe(controller, provider, envs.claim_rate, self.claim_queue.on_demand)
        return controller

    def adoption(self, recorder: Recorder) -> tuple[Controller[Key], ...]:
        """Create the controller that adopts pools, if it is enabled."""
        if not self._settings.adopt_pools:
            return ()
        adoption = Adoption(self._provider, recorder, cluster_id=self._settings.cluster_id)
        controller = Controller("adoption", adoption.reconcile, workers=1)
        env_events.subscribe_adoption(controller, self._provider)
        return (controller,)

    def follower(self) -> EnvironmentFollower:
        """Create the follower for a process without controllers."""
        name = self._settings.identity or f"{socket.gethostname()}-{ids.name_suffix()}"
        return EnvironmentFollower(
            self._provider,
            self.env_snapshots,
            self.claim_queue,
            self._settings.cluster_id,
            name,
            self._clock,
        )
