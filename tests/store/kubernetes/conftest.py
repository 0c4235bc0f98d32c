"""A store on the real API server, with namespaces for each test."""

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from paddock.store.kubernetes import KubernetesStore, load_kubeconfig
from tests.cluster.control_plane import ClusterInfo
from tests.store.backends import Harness, fresh_namespaces


def open_store(info: ClusterInfo, user: str = "admin") -> KubernetesStore:
    return KubernetesStore.open(load_kubeconfig([Path(info.kubeconfig)], context=user))


@pytest.fixture
async def harness(kube_cluster: ClusterInfo) -> AsyncGenerator[Harness]:
    namespaces = fresh_namespaces()
    for name in namespaces:  # deleted with the cluster
        kube_cluster.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    store = open_store(kube_cluster)
    try:
        yield Harness(store, *namespaces)
    finally:
        await store.close()
