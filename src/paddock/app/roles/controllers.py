"""The `controllers` role: the leader reconciles, the other processes stand by.

A standby follows the store like the leader, so that it takes over with full caches. A process that
loses the lease ends: its unfinished work belongs to the next leader, and a new process has none.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from paddock.adapters.gateway.activity_poller import ActivityPoller
from paddock.adapters.membership import parse_peers
from paddock.adapters.runtime_agent import RuntimeAgent
from paddock.api.health import create_app as create_ops
from paddock.app.wiring import backends, run_parts
from paddock.app.wiring.assembly import assemble
from paddock.app.wiring.cluster_runtime import ClusterRuntime
from paddock.app.wiring.http_server import AsgiServer, listen
from paddock.app.wiring.idle_pause import IdlePauses
from paddock.app.wiring.secrets import load_or_create, token_seed
from paddock.controllers.sandbox.waiting_requests import NoWaitingRequests
from paddock.engine.election import Elector, Timing
from paddock.engine.recorder import Recorder
from paddock.engine.supervisor import Part, StartGroup
from paddock.kit import clock as clocks
from paddock.kit import ids
from paddock.kit.errors import UnavailableError
from paddock.kit.tasks import background
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.meta import Key
from paddock.runtime.port import Runtime
from paddock.settings import Settings
from paddock.store.kubernetes.backend import KubernetesStore

log = logging.getLogger(__name__)

LEASE = "paddock-controllers"
Work = dict[str, Coroutine[Any, Any, None]]


async def run(settings: Settings, stop: asyncio.Event, on_ready: Callable[[], None]) -> None:
    """Stand by and lead in turn, until `stop` is set or the lease is lost."""
    seed = token_seed(load_or_create(settings))
    clock = clocks.system()
    async with contextlib.AsyncExitStack() as stack:
        store = await backends.open_store(settings)
        stack.push_async_callback(store.close)
        parts = assemble(settings, store, seed, clock, is_sole_writer=False, is_federated=False)
        provider = parts.provider
        stack.push_async_callback(parts.leave)
        cluster: ClusterRuntime | None = None
        if settings.runtime == "kubernetes":
            cluster = ClusterRuntime(
                settings,
                store=store,
                provider=provider,
                seed=seed,
                clock=clock,
                ceiling_of=parts.ceilings.of,
            )
        runtime: Runtime = cluster.driver if cluster else backends.open_runtime(settings)
        agent = await stack.enter_async_context(
            backends.opened_agent(settings, store, provider, seed, clock, runtime)
        )
        recorder = Recorder(store, "paddock", clock=clock)
        controllers = parts.build_controllers(
            runtime,
            agent,
            recorder,
            parts.build_batches(runtime, recorder),
            NoWaitingRequests(),
        )
        sampler = RuntimeAgent(runtime, seed, provider, clock)
        client = store.client if isinstance(store, KubernetesStore) else None
        activity = ActivityPoller(parse_peers(settings.peers), client, clock)
        stack.push_async_callback(activity.close)
        idle = IdlePauses(activity, sampler, provider=provider, clock=clock, recorder=recorder)
        server = AsgiServer(
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
            found: Work = {
                **controllers.work(),
                "idle pauses": idle.run(),
                "sampling": sampler.keep_sampling(only=_has_idle_pause),
            }
            if cluster is not None:
                found["policies"] = cluster.driver.policies.run()
            if parts.shares is not None:
                found["quota shares"] = parts.shares.run()
            if parts.idempotency_keys is not None:
                found["idempotency keys"] = parts.idempotency_keys.keep_swept()
            return found

        supervised = [
            run_parts.server_part(server, StartGroup.HTTP),
            Part(
                name="cache",
                group=StartGroup.CACHES,
                run=provider.serve,
                ready=provider.wait_synced,
            ),
            Part(name="election", group=StartGroup.LEADERS, run=partial(_compete, elector, work)),
        ]
        if cluster is not None:
            # In the group of the cache, so that both list their objects at the same time.
            supervised.append(run_parts.context_part("cluster", StartGroup.CACHES, cluster.run))
        await run_parts.run(supervised, stop)


def _has_idle_pause(sandbox: Sandbox) -> bool:
    return sandbox.spec.idle_pause is not None


def _timing(lease_seconds: float) -> Timing:
    return Timing(
        lease_seconds=lease_seconds,
        renew_seconds=lease_seconds * 2 / 3,
        # Also the timeout of one attempt: a busy API server needs up to a second.
        retry_seconds=max(lease_seconds / 8, min(1.0, lease_seconds / 4)),
    )


async def _compete(elector: Elector, work: Callable[[], Work]) -> None:
    """Stand by, do the work while leading, and raise when the lease is lost."""
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
        f"{elector.identity} has lost the lease {LEASE}",
        hint="the process ends and is restarted as a standby",
    )
