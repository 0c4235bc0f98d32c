"""Opens what settings name: a store, a runtime."""

from pathlib import Path

from paddock.kit.errors import InvalidError
from paddock.runtime.local.driver import LocalRuntime
from paddock.runtime.port import Runtime
from paddock.runtime.simulated import SimulatedRuntime
from paddock.settings import Settings
from paddock.store.kubernetes.access import load_access
from paddock.store.kubernetes.backend import KubernetesStore
from paddock.store.kubernetes.client import ClientSettings
from paddock.store.memory import MemoryStore
from paddock.store.port import Store
from paddock.store.sqlite.store import SqliteStore


async def open_store(settings: Settings) -> Store:
    """Open the store that settings name."""
    match settings.store:
        case "sqlite":
            return await SqliteStore.open(settings.state / "store.db", enforce_namespaces=True)
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
    """Open the runtime that settings name."""
    match settings.runtime:
        case "local":
            return LocalRuntime(settings.node_socket)
        case "simulated":
            return SimulatedRuntime()
        case "kubernetes":
            raise InvalidError("runtime: pods need the store `kubernetes` and a role of a cluster")
