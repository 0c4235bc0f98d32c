"""CRDs are upgraded in place: stored objects are kept, and watches continue."""

import asyncio
import copy
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from paddock.engine.informer import Informer
from paddock.kit.tasks import background
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.meta import Key
from paddock.store.kubernetes import KubernetesStore, load_kubeconfig
from tests.cluster.binaries import BinariesMissingError
from tests.cluster.control_plane import KubeCluster
from tests.cluster.definitions import definitions
from tests.cluster.fixtures import REQUIRE
from tests.cluster.info import ClusterInfo, RefusedError

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(180)]

CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
BOXES = "/apis/paddock.dev/v1alpha1/namespaces/default/sandboxes"
NEWER = "wakeOnTraffic"
"""A field that the older CRDs of these tests do not have."""


@pytest.fixture
def old_cluster() -> Iterator[ClusterInfo]:
    """A control plane with CRDs from before a field was added."""
    try:
        with KubeCluster(components=(), our_kinds=False) as cluster:
            for definition in definitions():
                cluster.info.request("POST", CRDS, _older(definition))
            yield cluster.info
    except BinariesMissingError as error:
        if os.environ.get(REQUIRE):
            pytest.fail(str(error))
        pytest.skip(str(error))


def _older(definition: dict[str, Any]) -> dict[str, Any]:
    older = copy.deepcopy(definition)
    if older["spec"]["names"]["kind"] == "Sandbox":
        schema = older["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        del schema["properties"]["spec"]["properties"][NEWER]
    return older


async def test_stored_objects_are_kept_watched_and_may_use_new_fields(
    old_cluster: ClusterInfo,
) -> None:
    store = KubernetesStore.open(load_kubeconfig([Path(old_cluster.kubeconfig)], context="admin"))
    try:
        await _upgraded(old_cluster, store)
    finally:
        await store.close()


async def _upgraded(old_cluster: ClusterInfo, store: KubernetesStore) -> None:
    box = {
        "apiVersion": "paddock.dev/v1alpha1",
        "kind": "Sandbox",
        "metadata": {"name": "kept", "labels": {"a": "1"}},
        "spec": {"templateRef": {"name": "base"}, "paused": True},
    }
    await until_served(old_cluster)
    before = old_cluster.request("POST", BOXES, box)
    newer = {**box, "metadata": {"name": "new"}, "spec": {**box["spec"], NEWER: {"enabled": True}}}
    with pytest.raises(RefusedError, match=NEWER):
        old_cluster.request("POST", f"{BOXES}?fieldValidation=Strict", newer)
    informer = Informer(store, Sandbox)
    async with background(informer.run(), name="informer"):
        await informer.wait_synced()
        await asyncio.to_thread(install, old_cluster)
        after = old_cluster.request("GET", f"{BOXES}/kept")
        for ours in (before, after):
            ours["metadata"].pop("managedFields", None)
        assert after == before, "not even its version changed"
        async with asyncio.timeout(100):
            while not _takes(old_cluster, newer):
                # The server rebuilds its validation shortly after the upgrade.
                await asyncio.sleep(0.1)
            kept = await store.get(Sandbox, Key("default", "kept"))
            await store.update(structs.replace(kept, spec=structs.replace(kept.spec, paused=False)))
            while not _shows(informer):
                await asyncio.sleep(0.05)


def _shows(informer: Informer[Sandbox]) -> bool:
    new, kept = (informer.get(Key("default", name)) for name in ("new", "kept"))
    return new is not None and kept is not None and not kept.spec.paused


def _takes(info: ClusterInfo, document: dict[str, Any]) -> bool:
    try:
        info.request("POST", f"{BOXES}?fieldValidation=Strict", document)
    except RefusedError as refused:
        if NEWER not in str(refused):
            raise
        return False
    return True


async def until_served(info: ClusterInfo) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                info.request("GET", BOXES)
            except RefusedError:
                await asyncio.sleep(0.1)
            else:
                return


def install(info: ClusterInfo) -> None:
    done = subprocess.run(
        [str(Path(sys.executable).parent / "paddock"), "kube", "install", "--image", "paddock:1"],
        env={
            **os.environ,
            "PATH": f"{info.binaries}:{os.environ['PATH']}",
            "KUBECONFIG": info.kubeconfig,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
