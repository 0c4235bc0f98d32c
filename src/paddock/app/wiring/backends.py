"""Opens the store, the runtime and the agent that settings select."""

import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path

from paddock.adapters.pod_agent import open_pod_agent
from paddock.adapters.runtime_agent import RuntimeAgent
from paddock.cache.provider import Provider
from paddock.kit.clock import Clock
from paddock.kit.encryption import DataCipher
from paddock.kit.errors import InvalidError
from paddock.manager.ports import Agent
from paddock.resources.tokens import TokenSeed
from paddock.runtime.local.driver import LocalRuntime
from paddock.runtime.outbound_settings import load_outbound
from paddock.runtime.port import Runtime
from paddock.runtime.simulated import SimulatedRuntime
from paddock.settings import Settings
from paddock.store.kubernetes.access import load_access
from paddock.store.kubernetes.backend import KubernetesStore
from paddock.store.kubernetes.client import ClientSettings
from paddock.store.memory import MemoryStore
from paddock.store.port import Store
from paddock.store.sqlite.store import SqliteStore


async def open_store(settings: Settings, cipher: DataCipher | None = None) -> Store:
    """Open the store that settings select; `cipher` encrypts one on this machine."""
    match settings.store:
        case "sqlite":
            return await SqliteStore.open(
                settings.state / "store.db", enforce_namespaces=True, cipher=cipher
            )
        case "memory":
            return MemoryStore(enforce_namespaces=True)
        case "kubernetes":
            kubeconfig = Path(settings.kubeconfig) if settings.kubeconfig else None
            limits = ClientSettings(
                requests_per_second=settings.cluster_requests_per_second,
                burst=int(settings.cluster_requests_per_second * 2),
            )
            return KubernetesStore.open(load_access(kubeconfig), limits)


def open_runtime(settings: Settings) -> Runtime:
    """Open the runtime that settings select."""
    match settings.runtime:
        case "local":
            return LocalRuntime(settings.node_socket)
        case "simulated":
            return SimulatedRuntime()
        case "kubernetes":
            raise InvalidError(
                "the runtime `kubernetes` needs the store `kubernetes`",
                hint="run the roles `api` and `controllers` on a cluster",
            )


@contextlib.asynccontextmanager
async def opened_agent(
    settings: Settings,
    store: Store,
    provider: Provider,
    seed: TokenSeed,
    clock: Clock,
    runtime: Runtime | None = None,
) -> AsyncGenerator[Agent]:
    """Open the agent for sandboxes that are pods, or the one for a runtime of this machine."""
    if settings.runtime == "kubernetes" and isinstance(store, KubernetesStore):
        agent, close = await open_pod_agent(
            settings, store, seed, clock, load_outbound(settings).outbound
        )
        try:
            yield agent
        finally:
            await close()
    else:
        yield RuntimeAgent(runtime or open_runtime(settings), seed, provider, clock)
