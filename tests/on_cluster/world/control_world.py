"""The world of the control scenarios on a cluster: two processes of each role.

`tests/scenario` is written against `tests.scenario.paddock.paddock`: a control plane in memory on
virtual time. This one has the same interface. Calls of the manager go over HTTP to two replicas of
the API in turn; state is read from the API server; actions on the "runtime" affect pods. Time is
real, so waits that check that nothing happens are shortened.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

import httpx
import msgspec
import pytest

from paddock.app.wiring import default_resources
from paddock.app.wiring.cluster_runtime import ClusterRuntime
from paddock.cache.pool_members import PoolMembers
from paddock.cache.provider import KINDS, Provider
from paddock.claims.quota.ledger import Ledger, Quota
from paddock.kit import clock as clocks
from paddock.kit import errors
from paddock.manager.keys import Keyring
from paddock.resources.kinds.batch import BatchSandbox
from paddock.resources.kinds.builtin import Namespace
from paddock.resources.kinds.claim import SandboxClaim
from paddock.resources.kinds.pods import Pod
from paddock.resources.kinds.pool import SandboxPool
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.kinds.template import SandboxTemplate
from paddock.resources.meta import Key, ObjectMeta
from paddock.resources.selectors import parse_labels
from paddock.resources.tokens import TokenSeed
from paddock.runtime.kubernetes import names
from paddock.runtime.port import Instance
from paddock.runtime.simulated import Operation
from paddock.settings import Settings
from paddock.store.memory import MemoryStore
from tests.on_cluster.world.catch_up import Replicas, caught_up
from tests.on_cluster.world.http_manager import (
    HttpKeyring,
    HttpManager,
    HttpOnly,
    RoundRobinTransport,
)
from tests.on_cluster.world.installation import API_KEY, Installation
from tests.on_cluster.world.intercepting_proxy import InterceptingProxy
from tests.on_cluster.world.light_pods import LightKubelet

T = TypeVar("T")
LEAST_PATIENCE_SECONDS = 100.0
BASE = Key("default", "base")


class Plane(HttpOnly):
    """The part of a control plane that scenarios use."""

    def __init__(
        self, clock: clocks.Clock, pool_members: PoolMembers, keyring: HttpKeyring, ledger: Ledger
    ) -> None:
        self.clock = clock
        self.pool_members = pool_members
        self.keyring = keyring
        self.ledger = ledger
        """A cache of the store; each process has its own."""
        self.controllers = Controllers()


class Controllers(HttpOnly):
    """The part of the controllers that scenarios use."""

    def __init__(self) -> None:
        self.probes = Probes()


class Probes(HttpOnly):
    """Probe results, set by scenarios."""

    def __init__(self) -> None:
        self._prober: Any = None


class PodRuntime(HttpOnly):
    """A runtime for scenarios, implemented with pods."""

    def __init__(
        self, store: Any, cluster: ClusterRuntime, kubelet: LightKubelet, provider: Provider
    ) -> None:
        self._store = store
        self._cluster = cluster
        self._kubelet = kubelet
        self._provider = provider

    async def inspect(self, uid: str) -> Instance | None:
        await caught_up(self._store, self._cluster._pods, parse_labels(names.LABEL_UID))
        return await self._cluster.driver.inspect(uid)

    def crash(self, uid: str, _reason: str = "") -> None:
        [box] = [item for item in self._provider.all(Sandbox) if item.metadata.uid == uid]
        self._kubelet.processes[box.metadata.name].kill()

    def fail_next(self, operation: Operation, _error: Exception) -> None:
        assert operation is Operation.CREATE
        self._kubelet.failing += 1

    def set_latency(self, operation: Operation, seconds: float) -> None:
        assert operation is Operation.CREATE
        self._kubelet.start_seconds = seconds

    @property
    def calls(self) -> dict[Operation, int]:
        return {Operation.CREATE: len(self._kubelet.started)}


class InterceptedStore:
    """The store for scenarios. A replaced method intercepts the writes of processes, if there is an
    intercepting proxy."""

    def __init__(self, store: Any, wire: InterceptingProxy | None) -> None:
        object.__setattr__(self, "_store", store)
        object.__setattr__(self, "_wire", wire)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if self._wire is None:
            pytest.skip(f"it replaces {name} of the store, which is in other processes here")
        if value == getattr(self._store, name):
            self._wire.hooks.pop(name, None)
        else:
            self._wire.hooks[name] = value

    def behave_like(self, faulty: Any) -> None:
        """Fail as a faulty in-memory store would."""

        def chance(name: str) -> Any:
            real = getattr(self._store, name)
            return lambda obj: faulty._chance(lambda: real(obj), obj)

        for name in ("create", "update", "update_status"):
            setattr(self, name, chance(name))
        faulty.list = self._store.list


class ClusterWorld:
    """One installation on a cluster, with the interface of the scenarios."""

    knows_at_once = False

    def __init__(
        self, paddock: Installation, ports: list[int], wire: InterceptingProxy | None
    ) -> None:
        self.paddock = paddock
        self.wire = wire
        self.store = InterceptedStore(paddock.store, wire)
        clock = clocks.system()
        self.provider = Provider(paddock.store, kinds=KINDS, clock=clock)
        pool_members = PoolMembers()
        self._claimed: dict[str, Sandbox] = {}
        """The latest versions of sandboxes, by public id."""
        self.provider.informer(Sandbox).subscribe(self._note)
        self.provider.informer(Sandbox).subscribe(pool_members.observe)
        self.provider.informer(BatchSandbox).subscribe(pool_members.observe_batch)
        ledger = Ledger()
        self.provider.informer(Sandbox).subscribe(ledger.observe)
        self.cluster = ClusterRuntime(
            Settings(agent_image="paddock"),
            store=paddock.store,
            provider=self.provider,
            seed=TokenSeed(b"seed"),
            clock=clock,
        )
        kubelet = paddock.kubelet
        assert isinstance(kubelet, LightKubelet)
        self.kubelet = kubelet
        kubelet.doctor = self._examined
        self.runtime = PodRuntime(paddock.store, self.cluster, kubelet, self.provider)
        self.replicas = Replicas(paddock.api_ports)
        writer: Any = self.provider.write
        self._mutate, writer.mutate = writer.mutate, self._mutated
        self.http = httpx.AsyncClient(
            transport=RoundRobinTransport(ports),
            base_url="http://paddock",
            headers={"X-API-Key": API_KEY},
            timeout=90,
        )
        self.manager = HttpManager(self)
        self.plane = Plane(clock, pool_members, HttpKeyring(self), ledger)

    async def _examined(self, name: str) -> int:
        """Return the exit code of a probe's command in a pod."""
        sandbox = self.provider.sandbox(Key("default", name))
        prober = self.plane.controllers.probes._prober
        if prober is None or sandbox is None or sandbox.spec.template is None:
            return 0
        return int(await prober(sandbox, sandbox.spec.template.probe) is not None)

    def seen(self, sandbox: Sandbox) -> Sandbox:
        """Store the version in a response: nothing older is returned afterwards."""
        self.provider.informer(Sandbox).observe(sandbox)
        return sandbox

    async def claimed(self, sandbox_id: str) -> Sandbox:
        """Read a sandbox by its public id from the API server."""
        async with asyncio.timeout(LEAST_PATIENCE_SECONDS):
            while sandbox_id not in self._claimed:
                await asyncio.sleep(0.02)
        found = self._claimed[sandbox_id]
        try:
            return self.seen(await self.store.get(Sandbox, found.key))
        except errors.NotFoundError:
            return found  # the machine was too slow

    def _note(self, _old: Sandbox | None, new: Sandbox | None) -> None:
        if new is not None and new.spec.claim is not None:
            self._claimed[new.spec.claim.sandbox_id] = new

    async def namespace(self, name: str) -> None:
        with contextlib.suppress(errors.AlreadyExistsError):
            await self.store.create(Namespace(metadata=ObjectMeta(name=name)))

    async def within_quota(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Retry a claim that fits into a quota until it succeeds.

        A replica waits some seconds for the share of another one, and then rejects the claim.
        """
        async with asyncio.timeout(LEAST_PATIENCE_SECONDS):
            while True:
                try:
                    return await ask()
                except errors.QuotaExceededError:
                    await asyncio.sleep(0.1)

    async def until(self, condition: Callable[[], bool], *, seconds: float = 30) -> None:
        """Wait until a condition holds with up-to-date caches."""
        async with asyncio.timeout(max(seconds, LEAST_PATIENCE_SECONDS)):
            while True:
                while not condition():
                    await asyncio.sleep(0.02)
                await self._catch_up()
                if condition():
                    return

    async def _catch_up(self) -> None:
        """Bring this cache and those of the API's replicas up to date."""
        for kind in (SandboxPool, Sandbox):
            items = await caught_up(self.paddock.store, self.provider.informer(kind))
            await self.replicas.tell(items)

    async def _mutated(self, kind: Any, key: Key, change: Any, **options: Any) -> Any:
        """Change an object; for a pool, wait until the controllers have observed it."""
        made = await self._mutate(kind, key, change, **options)

        def is_obeyed() -> bool:
            pool = self.provider.get(SandboxPool, key)
            return pool is None or pool.status.observed_generation >= made.metadata.generation

        if kind is SandboxPool:
            await self.until(is_obeyed)
        return made

    def pool(self, name: str = "base", namespace: str = "default") -> SandboxPool:
        found = self.provider.get(SandboxPool, Key(namespace, name))
        assert found is not None
        return found

    async def stocked(self, count: int, name: str = "base") -> None:
        key = Key("default", name)
        await self.until(lambda: len(self.plane.pool_members.members(key).available) >= count)

    async def resized(self, replicas: int) -> None:
        """Resize the base pool."""
        await self.provider.write.mutate(
            SandboxPool,
            BASE,
            lambda pool: msgspec.structs.replace(
                pool, spec=msgspec.structs.replace(pool.spec, replicas=replicas)
            ),
        )

    # ---- between scenarios ---------------------------------------------------------------

    async def begin(self, pool_size: int) -> None:
        """Set up the objects of a new installation and the namespaces of scenarios."""
        for name in ("alpha", "beta"):
            await self.namespace(name)
        fresh = MemoryStore()
        keyring = Keyring(fresh, self.plane.clock)
        await default_resources.ensure(fresh, keyring, Settings(pool_size=pool_size), API_KEY)
        for kind in (SandboxTemplate, SandboxPool):
            wanted = await fresh.get(kind, BASE)
            try:
                await self.provider.write.mutate(
                    kind,
                    BASE,
                    lambda item, spec=wanted.spec: msgspec.structs.replace(item, spec=spec),
                    is_fresh=True,
                )
            except errors.NotFoundError:
                await self.provider.write.create(wanted)

    async def end(self) -> None:
        """Remove everything."""
        self.kubelet.failing, self.kubelet.start_seconds = 0, 0.0
        self.plane.controllers.probes._prober = None
        if self.wire is not None:
            self.wire.hooks.clear()
        for kind in (BatchSandbox, SandboxPool, SandboxClaim):
            for item in (await self.store.list(kind)).items:
                with contextlib.suppress(errors.NotFoundError):
                    await self.store.delete(kind, item.key)
        await self.plane.keyring.set_team_quota("default", Quota())
        async with asyncio.timeout(LEAST_PATIENCE_SECONDS):
            while left := (await self.store.list(Sandbox)).items:
                await asyncio.gather(*(self._delete(item) for item in left if not item.is_deleting))
                await asyncio.sleep(0.1)
            while (await self.store.list(Pod, namespace="default")).items:
                await asyncio.sleep(0.05)
            await self._catch_up()

    async def _delete(self, sandbox: Sandbox) -> None:
        with contextlib.suppress(errors.NotFoundError, errors.ConflictError):
            await self.store.delete(Sandbox, sandbox.key)


@contextlib.asynccontextmanager
async def running(
    paddock: Installation, ports: list[int], wire: InterceptingProxy | None = None
) -> AsyncGenerator[ClusterWorld]:
    """Run the world of an installation during the body."""
    world = ClusterWorld(paddock, ports, wire)
    async with world.provider.run(), world.cluster.run():
        try:
            yield world
        finally:
            await world.replicas.close()
            await world.http.aclose()
