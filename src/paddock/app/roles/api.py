"""The `api` role: the manager and E2B's API on the store of a cluster, in any number of replicas.

A replica has no state of its own: it reads from the store and writes to it. The declarative API
is the cluster's own, so it is not served here.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from paddock.adapters.gateway.gateway_notifier import GatewayNotifier
from paddock.adapters.replicas import Replicas
from paddock.api.internal import GatewayReport
from paddock.app.wiring import audit, backends, default_resources, run_parts
from paddock.app.wiring.applications import build_application, build_login_limits, build_mcp
from paddock.app.wiring.assembly import assemble
from paddock.app.wiring.http_server import AsgiServer, listen
from paddock.app.wiring.secrets import load_or_create, token_seed
from paddock.app.wiring.tls import webhook
from paddock.engine.supervisor import Part, StartGroup
from paddock.kit import clock as clocks
from paddock.settings import Settings
from paddock.store.replicated import ReplicatedStore


async def run(settings: Settings, stop: asyncio.Event, on_ready: Callable[[], None]) -> None:
    """Serve until `stop` is set."""
    secrets = load_or_create(settings)
    seed = token_seed(secrets)
    clock = clocks.system()
    async with contextlib.AsyncExitStack() as stack:
        replicas = Replicas(settings.api_peers, secrets.token)
        opened = await backends.open_store(settings)
        store = ReplicatedStore(opened, replicas)
        stack.push_async_callback(store.close)
        parts = assemble(
            settings,
            store,
            seed,
            clock,
            is_sole_writer=False,
            is_federated=True,
            # Other replicas need not be notified of idempotency keys.
            idempotency_store=opened,
        )
        provider, keyring = parts.provider, parts.keyring
        stack.push_async_callback(parts.leave)
        gateways = GatewayNotifier(seed, clock)
        stack.callback(gateways.close)
        agent = await stack.enter_async_context(
            backends.opened_agent(settings, opened, provider, seed, clock)
        )
        manager = parts.build_manager(agent, gateways)

        async def on_report(report: GatewayReport) -> tuple[str, ...]:
            return gateways.register(report.url)

        calls = stack.enter_context(audit.opened(settings, clock))
        logins = build_login_limits(settings, clock)
        mcp = build_mcp(settings, keyring, logins, has_gateways=False)
        application = build_application(
            parts,
            manager,
            kube=_not_found,
            mcp=mcp,
            logins=logins,
            audit=calls,
            token=secrets.token,
            on_report=on_report,
        )
        server = AsgiServer(
            replicas.application(application, provider),
            listen(settings.api_host, settings.api_port),
            on_ready,
        )

        async def synced() -> None:
            await provider.wait_synced()
            await default_resources.ensure_first_key(keyring, secrets.api_key)

        others: dict[str, Callable[[], Awaitable[None]]] = {
            "replicas": replicas.keep_resolved,
            "key usage": parts.keep_keys_flushed,
            "audit log": calls.run,
            "failed claims": manager.cleanup.run,
            "mcp": mcp.run,
            "waiting claims": parts.environments.follower().run,
        }
        if parts.shares is not None:
            others["quota shares"] = parts.shares.run
        if parts.federation is not None:
            others["federation"] = parts.federation.run
        await run_parts.run(
            (
                Part(name="cache", group=StartGroup.CACHES, run=provider.serve, ready=synced),
                *(
                    Part(name=name, group=StartGroup.OTHERS, run=work)
                    for name, work in others.items()
                ),
                run_parts.context_part(
                    "webhook", StartGroup.OTHERS, partial(webhook.serving, settings)
                ),
                run_parts.server_part(server),
            ),
            stop,
        )


async def _not_found(_scope: Any, _receive: Any, send: Any) -> None:
    body = b'{"message":"use the API server of the cluster for these resources"}'
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 404, "headers": headers})
    await send({"type": "http.response.body", "body": body})
