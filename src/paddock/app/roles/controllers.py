"""The `controllers` role: one of several processes leads and reconciles, the others stand by warm.

A standby follows the store like the leader does, so that it takes over with full caches. Whoever
loses the lease ends: what it was about to do belongs to its successor, and a fresh process has no
half-done work.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from paddock.adapters.pod_agent import open_pod_agent
from paddock.adapters.runtime_agent import RuntimeAgent
from paddock.api.health import create_app as create_ops
from paddock.app.wiring import backends, run_parts
from paddock.app.wiring.batches import Batches, default_tasks, load_profiles
from paddock.app.wiring.controllers import Controllers
from paddock.app.wiring.environments import Environments
from paddock.app.wiring.http_server import Server, listen
from paddock.app.wiring.idle_pause import Idling
from paddock.app.wiring.kubernetes_runtime import ClusterRuntime
from paddock.app.wiring.manager import build_fitting, build_limiter
from paddock.app.wiring.secrets import load_or_create
from paddock.app.wiring.shared_cache import follow
from paddock.claims.idempotency import Firsts
from paddock.claims.quota.team_gate import TeamGate
from paddock.engine.election import Elector, Timing
from paddock.engine.recorder import Recorder
from paddock.engine.supervisor import Part, StartGroup
from paddock.kit import clock as clocks
from paddock.kit import ids
from paddock.kit.errors import UnavailableError
from paddock.kit.tasks import background
from paddock.manager.ports import Agent
from paddock.resources.meta import Key
from paddock.resources.tokens import TokenSeed
from paddock.runtime.port import Runtime
from paddock.settings import Settings
from paddock.store.kubernetes.backend import KubernetesStore

log = logging.getLogger(__name__)

LEASE = "paddock-controllers"
Work = dict[str, Coroutine[Any, Any, None]]


async def run(settings: Settings, stop: asyncio.Event, on_ready: Callable[[], None]) -> None:
    """Stand by, lead when it is our turn, until told to stop or the lease is lost."""
    seed = TokenSeed(load_or_create(settings).seed.encode())
    clock = clocks.system()
    async with contextlib.AsyncExitStack() as stack:
        store = await backends.open_store(settings)
        stack.push_async_callback(store.close)
        provider, pool_members, ledger, keyring, allowance = follow(settings, store, clock)
        stack.push_async_callback(allowance.leave)
        firsts = Firsts(store, provider, clock, ledger.account, settings.system_namespace)
        cluster: ClusterRuntime | None = None
        if settings.runtime == "kubernetes":
            cluster = ClusterRuntime(
                settings, store=store, provider=provider, seed=seed, clock=clock
            )
        runtime: Runtime = cluster.driver if cluster else backends.open_runtime(settings)
        agent: Agent = RuntimeAgent(runtime, seed, provider, clock)
        if cluster is not None and isinstance(store, KubernetesStore):
            agent, close = await open_pod_agent(settings, store, seed, clock)
            stack.push_async_callback(close)
        recorder = Recorder(store, "paddock", clock=clock)
        environments = Environments(settings, provider, pool_members, keyring, clock)
        batches = Batches(
            provider=provider,
            pool_members=pool_members,
            seed=seed,
            clock=clock,
            recorder=recorder,
            environments=environments,
            tasks=default_tasks(runtime, seed, clock),
            profiles=load_profiles(settings),
            is_alone=False,
        )
        controllers = Controllers(
            provider=provider,
            pool_members=pool_members,
            runtime=runtime,
            seed=seed,
            clock=clock,
            recorder=recorder,
            batches=batches,
            environments=environments,
            gate=TeamGate(allowance, build_limiter(settings, clock)),
            fitting=build_fitting(settings, agent, provider),
        )
        idling = Idling(
            settings,
            store=store,
            runtime=runtime,
            provider=provider,
            seed=seed,
            clock=clock,
            recorder=recorder,
        )
        stack.push_async_callback(idling.close)
        server = Server(
            create_ops(provider), listen(settings.api_host, settings.api_port), on_ready
        )
        elector = Elector(
            store,
            Key(settings.system_namespace, LEASE),
            settings.identity or f"{socket.gethostname()}-{ids.name_suffix()}",
            timing=_timing(settings.lease_seconds),
            clock=clock,
        )

        def work() -> Work:
            sweeping = {} if cluster is None else {"policies": cluster.driver.policies.run()}
            ours = {"quota shares": allowance.run(), "idempotency keys": firsts.keep_swept()}
            return {**controllers.work(), **idling.work(), **sweeping, **ours}

        parts = [
            run_parts.serving(server, StartGroup.HTTP),
            Part(
                name="cache",
                group=StartGroup.CACHES,
                run=provider.serve,
                ready=provider.wait_synced,
            ),
            Part(name="election", group=StartGroup.LEADERS, run=partial(_take_part, elector, work)),
        ]
        if cluster is not None:
            # Beside the cache: what takes a server a while to write, the other takes in meanwhile.
            parts.append(run_parts.held("cluster", StartGroup.CACHES, cluster.run))
        await run_parts.run(parts, stop)


def _timing(lease_seconds: float) -> Timing:
    return Timing(
        lease_seconds=lease_seconds,
        renew_seconds=lease_seconds * 2 / 3,
        # One try may take so long: less than a second is nothing to a busy API server.
        retry_seconds=max(lease_seconds / 8, min(1.0, lease_seconds / 4)),
    )


async def _take_part(elector: Elector, work: Callable[[], Work]) -> None:
    """Stand by, lead when it is our turn, and end with an error when that is over."""
    lost = asyncio.Event()

    async def lead() -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for name, task in work().items():
                    tasks.create_task(task, name=name)
        finally:
            lost.set()

    async with (
        background(elector.run(lead), name="election") as election,
        background(lost.wait(), name="lost") as losing,
    ):
        await asyncio.wait((election, losing), return_when=asyncio.FIRST_COMPLETED)
        if election.done():
            await election
    raise UnavailableError(
        f"{elector.identity} does not lead any more", hint="it is started anew to stand by"
    )
