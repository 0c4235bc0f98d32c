"""The control plane: store, cache, controllers, manager and APIs in one process."""

import asyncio
import gc
import logging
from collections.abc import Callable, Coroutine
from datetime import datetime, timedelta
from typing import Any

from paddock.adapters import federation_transport
from paddock.adapters.gateway_notifier import Gateways
from paddock.adapters.runtime_agent import RuntimeAgent
from paddock.api.dispatcher import Dispatcher
from paddock.api.e2b.app import create_app as create_e2b
from paddock.api.health import create_app as create_ops
from paddock.api.internal import Report
from paddock.api.internal import create_app as create_internal
from paddock.api.kube.app import create_app as create_kube
from paddock.api.kube.settings import KubeApiSettings
from paddock.app.wiring import default_resources, run_parts
from paddock.app.wiring.batches import Batches, default_tasks, load_profiles
from paddock.app.wiring.controllers import Controllers
from paddock.app.wiring.environments import Environments
from paddock.app.wiring.http_server import Server, listen
from paddock.app.wiring.manager import build_fitting, build_limiter, build_manager, own_records
from paddock.app.wiring.secrets import Secrets
from paddock.cache.pool_members import PoolMembers
from paddock.cache.provider import KINDS, Provider
from paddock.claims.idempotency import Firsts
from paddock.claims.ports import Announcer
from paddock.claims.quota.ledger import Ledger
from paddock.claims.quota.reserve import Allowance
from paddock.claims.quota.share_manager import Apportioned
from paddock.claims.quota.team_gate import TeamGate
from paddock.controllers.batch.tasks.runner import TaskRunner
from paddock.controllers.idle.controller import IdleController
from paddock.controllers.idle.plan import Seen
from paddock.engine.recorder import Recorder
from paddock.engine.supervisor import Part, StartGroup
from paddock.kit import clock as clocks
from paddock.kit import ids
from paddock.kit.clock import Clock
from paddock.kit.errors import PaddockError
from paddock.kit.logs import fields
from paddock.manager.keys import Keyring
from paddock.resources.kinds.batch import BatchSandbox
from paddock.resources.kinds.builtin import Lease, Secret
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.tokens import TokenSeed
from paddock.runtime.port import Runtime
from paddock.settings import Settings
from paddock.store.embedded import EmbeddedStore
from paddock.store.port import Store

log = logging.getLogger(__name__)

KEY_FLUSH_SECONDS = 60.0
EVENT_SWEEP_SECONDS = 60.0


class ControlPlane:
    """Everything of one control plane, wired and not yet running."""

    def __init__(
        self,
        settings: Settings,
        secrets: Secrets,
        *,
        store: Store,
        runtime: Runtime,
        announcer: Announcer | None = None,
        clock: Clock | None = None,
        tasks: TaskRunner | None = None,
        is_alone: bool | None = None,
    ) -> None:
        """Wire everything; `is_alone` says that no other control plane has this store."""
        self.settings = settings
        self.secrets = secrets
        self.store = store
        self.runtime = runtime
        self.clock = clock or clocks.system()
        self.seed = TokenSeed(secrets.seed.encode())
        alone = isinstance(store, EmbeddedStore) if is_alone is None else is_alone
        self.provider = Provider(
            store,
            kinds=(*KINDS, Secret) if alone else (*KINDS, Secret, Lease),
            filters=own_records(),
            clock=self.clock,
        )
        self.pool_members = PoolMembers()
        self.ledger = Ledger("" if alone else ids.sandbox_id())
        self.keyring = Keyring(store, self.clock)
        self.recorder = Recorder(store, "paddock", clock=self.clock)
        self.agent = RuntimeAgent(runtime, self.seed, self.provider, self.clock)
        self.last_active: dict[str, datetime] = {}
        """When each sandbox last had traffic, by uid, as gateways report it."""
        self._watching_since = self.clock.now()
        self.gateways = Gateways(self.seed, self.clock)
        self._subscribe()
        self.shares: Apportioned | None = None
        self.firsts: Firsts | None = None
        if not alone:
            self.shares = Apportioned(self.ledger, self.keyring, self.provider, self.clock)
            self.firsts = Firsts(store, self.provider, self.clock, self.ledger.account)
        allowance = self.shares or Allowance(self.ledger, self.keyring)
        self.federated = federation_transport.federated(settings, self.seed, self.clock)
        self.environments = Environments(
            settings,
            self.provider,
            self.pool_members,
            self.keyring,
            self.clock,
            self.federated.federation if self.federated else None,
        )
        self.batches = Batches(
            provider=self.provider,
            pool_members=self.pool_members,
            seed=self.seed,
            clock=self.clock,
            recorder=self.recorder,
            environments=self.environments,
            tasks=tasks or default_tasks(runtime, self.seed, self.clock),
            profiles=load_profiles(settings),
            is_alone=alone,
        )
        limiter = build_limiter(settings, self.clock)
        self.manager = build_manager(
            settings,
            provider=self.provider,
            pool_members=self.pool_members,
            allowance=allowance,
            firsts=self.firsts,
            agent=self.agent,
            announcer=announcer or self.gateways,
            seed=self.seed,
            clock=self.clock,
            limiter=limiter,
            environments=self.environments.claims,
        )
        self.controllers = Controllers(
            provider=self.provider,
            pool_members=self.pool_members,
            runtime=runtime,
            seed=self.seed,
            clock=self.clock,
            recorder=self.recorder,
            batches=self.batches,
            environments=self.environments,
            gate=TeamGate(allowance, limiter),
            fitting=build_fitting(settings, self.agent, self.provider),
        )

    def _subscribe(self) -> None:
        sandboxes = self.provider.informer(Sandbox)
        sandboxes.subscribe(self.pool_members.observe)
        sandboxes.subscribe(self.ledger.observe)
        sandboxes.subscribe(self._forget_activity)
        self.provider.informer(BatchSandbox).subscribe(self.pool_members.observe_batch)
        self.provider.informer(Secret).subscribe(self.keyring.observe)

    def application(self) -> Dispatcher:
        """Give everything this control plane serves, as one application."""
        kube = KubeApiSettings(
            tokens=(self.secrets.token,), allow_anonymous=self.settings.allow_anonymous
        )
        e2b = create_e2b(self.manager, self.keyring, self.seed, domain=self.settings.domain or None)
        doors = federation_transport.entrances(
            self.federated, self.manager, self.environments.router, e2b, self.keyring
        )
        return Dispatcher(
            e2b=doors.e2b,
            kube=create_kube(self.store, kube),
            ops=create_ops(self.provider),
            internal=create_internal(
                self.manager, self.secrets.token, self._take_report, doors.elsewhere
            ),
            federation=doors.federation,
        )

    def work(self) -> dict[str, Coroutine[Any, Any, None]]:
        """Give what runs beside the API, by name."""
        return {
            **self.controllers.work(),
            **({"federation": self.federated.run()} if self.federated else {}),
            **({"quota shares": self.shares.run()} if self.shares else {}),
            **({"idempotency keys": self.firsts.keep_swept()} if self.firsts else {}),
            "failed claims": self.manager.disowning.run(),
            "sampling": self.agent.keep_sampling(),
            "idle pauses": IdleController(
                self.provider, self._doings, self.clock, self.recorder
            ).run(),
            "key usage": self._flush_keys(),
            "old events": self._sweep_events(),
        }

    async def _sweep_events(self) -> None:
        """Forget old Events; a cluster does so by itself."""
        while isinstance(self.store, EmbeddedStore):
            await asyncio.sleep(EVENT_SWEEP_SECONDS)
            try:
                await self.store.sweep(self.clock.now())
            except PaddockError as error:
                log.warning("old events were not swept", extra=fields(error=error.message))

    async def _take_report(self, report: Report) -> tuple[str, ...]:
        """Take in where a gateway is and how long ago sandboxes had traffic through it."""
        now = self.clock.now()
        for uid, seconds in report.seen.items():
            active = now - timedelta(seconds=seconds)
            self.last_active[uid] = max(active, self.last_active.get(uid, active))
        return self.gateways.heard(report)

    def _doings(self, sandbox: Sandbox) -> Seen:
        """Give what is known of a sandbox's traffic and use of processors."""
        uid = sandbox.metadata.uid
        return Seen(
            watching_since=self._watching_since,
            last_request=self.last_active.get(uid),
            loads=self.agent.loads(uid),
        )

    def _forget_activity(self, old: Sandbox | None, new: Sandbox | None) -> None:
        if new is None and old is not None:
            self.last_active.pop(old.metadata.uid, None)

    async def _flush_keys(self) -> None:
        while True:
            await asyncio.sleep(KEY_FLUSH_SECONDS)
            await self.keyring.flush_last_used()

    async def run(self, stop: asyncio.Event, *, on_ready: Callable[[], None]) -> None:
        """Run until told to stop: cache first, then controllers, then the API."""
        listener = listen(self.settings.api_host, self.settings.api_port)
        server = Server(self.application(), listener, on_ready)
        parts = (
            Part(
                name="cache",
                group=StartGroup.CACHES,
                run=self.provider.serve,
                ready=self._until_known,
            ),
            run_parts.together("controllers", self.work),
            run_parts.serving(server),
        )
        try:
            await run_parts.run(parts, stop)
        finally:
            listener.close()
            self.gateways.close()
            if self.shares is not None:
                await self.shares.leave()

    async def _until_known(self) -> None:
        """Wait for the cache, and add what every installation has."""
        await self.provider.wait_synced()
        await default_resources.ensure(
            self.store, self.keyring, self.settings, self.secrets.api_key
        )
        # What was loaded lives as long as the process: the collector need not walk it.
        gc.collect()
        gc.freeze()
