"""The `api` role: the manager and E2B's API on a cluster's store; as many replicas as are wanted.

It keeps nothing: what it knows, it reads from the store; what it does, it writes there. The
declarative API is the cluster's own, so none is served here.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from paddock.adapters import federation_transport
from paddock.adapters.gateway_notifier import Gateways
from paddock.adapters.pod_agent import open_pod_agent
from paddock.adapters.replicas import Replicas
from paddock.adapters.runtime_agent import RuntimeAgent
from paddock.api.dispatcher import Dispatcher
from paddock.api.e2b.app import create_app as create_e2b
from paddock.api.health import create_app as create_ops
from paddock.api.internal import Report
from paddock.api.internal import create_app as create_internal
from paddock.app.wiring import backends, run_parts, webhook
from paddock.app.wiring.environments import Environments
from paddock.app.wiring.http_server import Server, listen
from paddock.app.wiring.manager import build_manager
from paddock.app.wiring.secrets import load_or_create
from paddock.app.wiring.shared_cache import follow
from paddock.cache.provider import Provider
from paddock.claims.caller import Role
from paddock.claims.idempotency import Firsts
from paddock.engine.supervisor import Part, StartGroup
from paddock.kit import clock as clocks
from paddock.kit.clock import Clock
from paddock.kit.errors import AlreadyExistsError
from paddock.manager.keys import Keyring, key_hash
from paddock.manager.ports import Agent
from paddock.resources.tokens import TokenSeed
from paddock.settings import Settings
from paddock.store.kubernetes.backend import KubernetesStore
from paddock.store.port import Store
from paddock.store.replicated import ReplicatedStore

KEY_FLUSH_SECONDS = 60.0


async def run(settings: Settings, stop: asyncio.Event, on_ready: Callable[[], None]) -> None:
    """Serve until told to stop."""
    secrets = load_or_create(settings)
    seed = TokenSeed(secrets.seed.encode())
    clock = clocks.system()
    async with contextlib.AsyncExitStack() as stack:
        replicas = Replicas(settings.api_peers, secrets.token)
        opened = await backends.open_store(settings)
        store = ReplicatedStore(opened, replicas)
        stack.push_async_callback(store.close)
        provider, pool_members, ledger, keyring, allowance = follow(settings, store, clock)
        stack.push_async_callback(allowance.leave)
        gateways = Gateways(seed, clock)
        stack.callback(gateways.close)
        agent, close = await _agent(settings, opened, provider, seed, clock)
        stack.push_async_callback(close)
        federated = federation_transport.federated(settings, seed, clock)
        federation = federated.federation if federated else None
        environments = Environments(settings, provider, pool_members, keyring, clock, federation)
        manager = build_manager(
            settings,
            provider=provider,
            pool_members=pool_members,
            allowance=allowance,
            # Its records are of no interest to other replicas, so they are not told of them.
            firsts=Firsts(opened, provider, clock, ledger.account, settings.system_namespace),
            agent=agent,
            announcer=gateways,
            seed=seed,
            clock=clock,
            environments=environments.claims,
        )

        async def take_report(report: Report) -> tuple[str, ...]:
            return gateways.heard(report)

        e2b = create_e2b(manager, keyring, seed, domain=settings.domain or None)
        doors = federation_transport.entrances(
            federated, manager, environments.router, e2b, keyring
        )
        application = Dispatcher(
            e2b=doors.e2b,
            kube=_not_here,
            ops=create_ops(provider),
            internal=create_internal(manager, secrets.token, take_report, doors.elsewhere),
            federation=doors.federation,
        )
        server = Server(
            replicas.application(application, provider),
            listen(settings.api_host, settings.api_port),
            on_ready,
        )

        async def known() -> None:
            await provider.wait_synced()
            await _ensure_key(keyring, secrets.api_key)

        others: dict[str, Callable[[], Awaitable[None]]] = {
            "replicas": replicas.keep_found,
            "key usage": partial(_flush_keys, keyring),
            "failed claims": manager.disowning.run,
            "quota shares": allowance.run,
            "waiting claims": environments.apart().run,
        }
        if federated is not None:
            others["federation"] = federated.run
        parts = (
            Part(name="cache", group=StartGroup.CACHES, run=provider.serve, ready=known),
            *(Part(name=name, group=StartGroup.OTHERS, run=work) for name, work in others.items()),
            run_parts.held("webhook", StartGroup.OTHERS, partial(webhook.served, settings)),
            run_parts.serving(server),
        )
        await run_parts.run(parts, stop)


async def _agent(
    settings: Settings, store: Store, provider: Provider, seed: TokenSeed, clock: Clock
) -> tuple[Agent, Callable[[], Any]]:
    if settings.runtime == "kubernetes" and isinstance(store, KubernetesStore):
        return await open_pod_agent(settings, store, seed, clock)

    async def nothing() -> None:
        return

    return RuntimeAgent(backends.open_runtime(settings), seed, provider, clock), nothing


async def _ensure_key(keyring: Keyring, api_key: str) -> None:
    """Make the first key where there is none; replicas that start together make it once."""
    if not api_key or any(key.hash == key_hash(api_key) for key in keyring.listed()):
        return
    with contextlib.suppress(AlreadyExistsError):
        await keyring.create(
            name="first key",
            role=Role.ADMIN,
            secret=api_key,
            key_id=f"first-key-{key_hash(api_key)[:12]}",
        )


async def _flush_keys(keyring: Keyring) -> None:
    while True:
        await asyncio.sleep(KEY_FLUSH_SECONDS)
        await keyring.flush_last_used()


async def _not_here(_scope: Any, _receive: Any, send: Any) -> None:
    body = b'{"message":"ask the cluster\'s own API server for these resources"}'
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 404, "headers": headers})
    await send({"type": "http.response.body", "body": body})
