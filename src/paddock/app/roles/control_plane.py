"""The `control` role: store, cache, controllers, manager and APIs in one process."""

import asyncio
import gc
import logging
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from functools import cached_property, partial
from typing import Any

from paddock.adapters.gateway.activity_reports import ActivityReports
from paddock.adapters.gateway.gateway_notifier import GatewayNotifier
from paddock.adapters.node_metrics import NodeMetrics
from paddock.adapters.runtime_agent import RuntimeAgent
from paddock.api.audit.described import describe_kube
from paddock.api.audit.event import OPERATOR
from paddock.api.audit.log import AuditLog
from paddock.api.audit.middleware import Audited
from paddock.api.dispatcher import Dispatcher
from paddock.api.federation.app import Application
from paddock.api.internal import GatewayReport
from paddock.api.kube.app import create_app as create_kube
from paddock.api.kube.settings import KubeApiSettings
from paddock.app.wiring import audit, backends, default_resources, run_parts
from paddock.app.wiring.applications import (
    build_application,
    build_key_writes,
    build_login_limits,
    build_mcp,
)
from paddock.app.wiring.assembly import assemble
from paddock.app.wiring.http_server import AsgiServer, listen
from paddock.app.wiring.idle_pause import IdlePauses
from paddock.app.wiring.secrets import Secrets, load_or_create, token_seed
from paddock.app.wiring.tls import own_certificate
from paddock.claims.ports import Announcer
from paddock.controllers.batch.tasks.runner import TaskRunner
from paddock.controllers.template_build.ports import BuildShell
from paddock.engine.recorder import Recorder
from paddock.engine.supervisor import Part, StartGroup
from paddock.installation.reloading import KeyringFollower
from paddock.kit import clock as clocks
from paddock.kit.clock import Clock
from paddock.kit.encryption import DataCipher
from paddock.kit.errors import PaddockError
from paddock.kit.logs import fields
from paddock.resources.tokens import TokenSeed
from paddock.runtime import host_paths
from paddock.runtime.local.driver import LocalRuntime
from paddock.runtime.local.storage.reserve import DiskReserve, export_metrics
from paddock.runtime.port import Runtime
from paddock.runtime.support import support_check
from paddock.settings import Settings
from paddock.store.embedded import EmbeddedStore
from paddock.store.port import Store
from paddock.store.sqlite import SqliteStore

log = logging.getLogger(__name__)

EVENT_SWEEP_SECONDS = 60.0


class ControlPlane:
    """One control plane, wired and not yet running."""

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
        is_sole_writer: bool | None = None,
        expected_gateways: int = 0,
        audit: AuditLog | None = None,
        cipher: DataCipher | None = None,
        build_shell: BuildShell | None = None,
    ) -> None:
        """Wire the parts; `is_sole_writer`: no other process writes to the store.

        `expected_gateways` run already, or are about to. Without `audit`, calls are not recorded.
        With the `cipher` of the store, changes of the keyring are followed.
        """
        self.settings = settings
        self.secrets = secrets
        self.store = store
        self.runtime = runtime
        self.clock = clock or clocks.system()
        self.seed = token_seed(secrets)
        self._keyring = _follower(settings, secrets, self.seed, cipher) if cipher else None
        self.assembly = assemble(
            settings,
            store,
            self.seed,
            self.clock,
            is_sole_writer=isinstance(store, EmbeddedStore)
            if is_sole_writer is None
            else is_sole_writer,
            is_federated=True,
        )
        self.provider = self.assembly.provider
        self.pool_members = self.assembly.pool_members
        self.ledger = self.assembly.ledger
        self.keyring = self.assembly.keyring
        self.shares = self.assembly.shares
        self.idempotency_keys = self.assembly.idempotency_keys
        self.federation = self.assembly.federation
        self.environments = self.assembly.environments
        self.recorder = Recorder(store, "paddock", clock=self.clock)
        self.agent = RuntimeAgent(runtime, self.seed, self.provider, self.clock)
        self.gateways = GatewayNotifier(self.seed, self.clock, expected=expected_gateways)
        self.manager = self.assembly.build_manager(self.agent, announcer or self.gateways)
        self.batches = self.assembly.build_batches(runtime, self.recorder, tasks)
        self.controllers = self.assembly.build_controllers(
            runtime, self.agent, self.recorder, self.batches, self.gateways, build_shell
        )
        self.activity = ActivityReports(self.clock)
        self.audit = audit or AuditLog(None, self.clock)
        self.logins = build_login_limits(settings, self.clock)
        self.mcp = build_mcp(settings, self.keyring, self.logins, has_gateways=True)
        self._idle = IdlePauses(
            self.activity,
            self.agent,
            provider=self.provider,
            clock=self.clock,
            recorder=self.recorder,
        )

    @cached_property
    def declarative_api(self) -> Application:
        """The application of the declarative API."""
        kube = KubeApiSettings(tokens=(self.secrets.token,))
        allowed = host_paths.parse(self.settings.host_paths)
        own = self.settings.cluster_id
        checks = [support_check(self.runtime.name, allowed_paths=allowed, cluster=own)]
        app = create_kube(
            self.store,
            kube,
            checks=checks,
            logins=self.logins,
            find_key=self.keyring.authenticate,
            key_writes=build_key_writes(self.assembly, self.store),
        )
        return Audited(app, self.audit, describe_kube, unnamed=OPERATOR)

    def application(self) -> Dispatcher:
        """Return the HTTP application."""
        return build_application(
            self.assembly,
            self.manager,
            kube=self.declarative_api,
            mcp=self.mcp,
            logins=self.logins,
            audit=self.audit,
            token=self.secrets.token,
            on_report=self.on_report,
        )

    def work(self) -> dict[str, Coroutine[Any, Any, None]]:
        """Return what runs beside the API, by name."""
        return {
            **self.controllers.work(),
            **({"federation": self.federation.run()} if self.federation else {}),
            **({"quota shares": self.shares.run()} if self.shares else {}),
            **(
                {"idempotency keys": self.idempotency_keys.keep_swept()}
                if self.idempotency_keys
                else {}
            ),
            "failed claims": self.manager.cleanup.run(),
            "sampling": self.agent.keep_sampling(),
            "idle pauses": self._idle.run(),
            "key usage": self.assembly.keep_keys_flushed(),
            "old events": self._sweep_events(),
            **(
                {"store encryption": self.store.keep_encrypted()}
                if isinstance(self.store, SqliteStore)
                else {}
            ),
            "audit log": self.audit.run(),
            "mcp": self.mcp.run(),
            **({"keyring file": self._keyring.run()} if self._keyring else {}),
            **self._node_metrics(),
        }

    def _node_metrics(self) -> dict[str, Coroutine[Any, Any, None]]:
        if not isinstance(self.runtime, LocalRuntime):
            return {}
        return {"metrics of the node": NodeMetrics().run(self.runtime)}

    async def _sweep_events(self) -> None:
        """Delete old Events at intervals. A cluster deletes them itself."""
        while isinstance(self.store, EmbeddedStore):
            await asyncio.sleep(EVENT_SWEEP_SECONDS)
            try:
                await self.store.sweep(self.clock.now())
            except PaddockError as error:
                log.warning("old events were not deleted", extra=fields(error=error.message))

    async def on_report(self, report: GatewayReport) -> tuple[str, ...]:
        """Record a gateway's address and traffic; return the addresses of all gateways."""
        self.activity.observe(report)
        return self.gateways.register(report.url)

    async def run(self, stop: asyncio.Event, *, on_ready: Callable[[], None]) -> None:
        """Run until `stop` is set: the cache first, then controllers, then the API."""
        if self.settings.runtime == "local":
            reserve = DiskReserve(self.settings.state, self.settings.disk_reserve_bytes)
            export_metrics(reserve)
        listener = listen(self.settings.api_host, self.settings.api_port)
        server = AsgiServer(self.application(), listener, on_ready)
        parts = [
            Part(
                name="cache", group=StartGroup.CACHES, run=self.provider.serve, ready=self._synced
            ),
            run_parts.group_part("controllers", self.work),
            run_parts.server_part(server),
        ]
        if self.settings.kube_port:
            parts.append(run_parts.context_part("kubectl", StartGroup.API, self._serving_kubectl))
        try:
            await run_parts.run(parts, stop)
        finally:
            listener.close()
            self.gateways.close()
            await self.assembly.leave()

    def _serving_kubectl(self) -> AbstractAsyncContextManager[None]:
        """Serve the declarative API over TLS on loopback."""
        return own_certificate.serving(
            self.declarative_api,
            own_certificate.of_installation(self.settings, self.clock),
            port=self.settings.kube_port,
        )

    async def _synced(self) -> None:
        """Wait for the cache, then create the default resources."""
        await self.provider.wait_synced()
        await default_resources.ensure(
            self.store, self.keyring, self.settings, self.secrets.api_key
        )
        # The loaded objects live as long as the process: exempt them from garbage collection.
        gc.collect()
        gc.freeze()


def _follower(
    settings: Settings, secrets: Secrets, seed: TokenSeed, cipher: DataCipher
) -> KeyringFollower:
    load = partial(load_or_create, settings)
    return KeyringFollower(settings.keyring, load, secrets, seed, cipher)


async def run(settings: Settings, stop: asyncio.Event, on_ready: Callable[[], None]) -> None:
    """Run the control plane until `stop` is set."""
    secrets = load_or_create(settings)
    cipher = DataCipher(secrets.encryption_keys) if secrets.encryption_keys else None
    store = await backends.open_store(settings, cipher)
    runtime = backends.open_runtime(settings)
    clock = clocks.system()
    try:
        with audit.opened(settings, clock) as calls:
            plane = ControlPlane(
                settings,
                secrets,
                store=store,
                runtime=runtime,
                clock=clock,
                expected_gateways=settings.gateway_count,
                audit=calls,
                cipher=cipher,
            )
            await plane.run(stop, on_ready=on_ready)
    finally:
        await store.close()
