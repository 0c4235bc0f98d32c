"""A separate control plane for these tests, which restart it and fill it."""

import os
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.cluster.binaries import BinariesMissingError
from tests.cluster.control_plane import KubeCluster
from tests.cluster.fixtures import REQUIRE
from tests.cluster.kubelet import Kubelet, base_rootfs
from tests.on_cluster.world.installation import LEASE_SECONDS, SDK, Installation


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the test named by `LAST` of a module last, because it breaks the others."""
    modules = {item.path: number for number, item in reversed([*enumerate(items)])}
    items.sort(key=lambda item: (modules[item.path], _is_last(item)))


def _is_last(item: pytest.Item) -> bool:
    return item.name == getattr(getattr(item, "module", None), "LAST", None)


@pytest.fixture(scope="module")
def own_cluster() -> Iterator[KubeCluster]:
    """etcd, API server and controller manager, for one module."""
    try:
        # The node's lease is not renewed; without the node controller the node stays ready.
        with KubeCluster(controllers="*,-node-lifecycle-controller") as cluster:
            yield cluster
    except BinariesMissingError as error:
        if os.environ.get(REQUIRE):
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def paddock(
    own_cluster: KubeCluster, request: pytest.FixtureRequest
) -> AsyncGenerator[Installation]:
    """Two processes of each role on a real API server. `LEASE` is the lease duration."""
    rootfs: Path | None = base_rootfs()
    if rootfs is None or os.geteuid() != 0:
        pytest.skip("the fake kubelet needs root and the base image (`paddock image build-base`)")
    if not SDK.exists():
        pytest.skip("the E2B client is not installed (scripts/install-clients)")
    lease = getattr(request.module, "LEASE", LEASE_SECONDS)
    async with Installation(
        own_cluster.info, lambda s: Kubelet(s, rootfs), lease_seconds=lease
    ) as installation:
        yield installation
