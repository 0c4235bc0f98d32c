"""Restarts, compaction and network failures: the store recovers or reports an error."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import aclosing

import pytest
from msgspec import structs

from paddock.kit.errors import DeadlineExceededError, GoneError
from paddock.resources.kinds.builtin import Secret
from paddock.resources.meta import Key, ObjectMeta
from paddock.store.kubernetes import ClientSettings, KubernetesStore
from paddock.store.port import Change
from tests.cluster.binaries import BinariesMissingError, directory_with
from tests.cluster.control_plane import KubeCluster
from tests.store.kubernetes.conftest import open_store
from tests.store.kubernetes.stalling_proxy import stalling_proxy

pytestmark = [pytest.mark.kubernetes, pytest.mark.faults, pytest.mark.timeout(180)]

PATIENCE_SECONDS = 150.0
SILENCE_SECONDS = 4.0
"""Timeout of requests that get no response."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[KubeCluster]:
    try:
        directory_with(["etcd", "kube-apiserver", "kubectl"], build=False)
    except BinariesMissingError as error:
        pytest.skip(str(error))
    with KubeCluster(components=(), our_kinds=False) as running:
        yield running


async def restart(cluster: KubeCluster) -> None:
    """Kill the server and start it again without blocking the event loop."""
    cluster.stop_process("kube-apiserver")
    cluster.start_process("kube-apiserver")
    await asyncio.to_thread(cluster.wait_ready)


async def write(store: KubernetesStore, *names: str) -> None:
    for name in names:
        await store.create(Secret(metadata=ObjectMeta(namespace="default", name=name)))


async def test_a_reader_survives_a_restart_of_the_server_without_loss(
    cluster: KubeCluster,
) -> None:
    """The watch is resumed, or ends with `GoneError` and the reader lists again.

    The watch cache of a new server begins at its first list. A version from before is too old for
    it if anything at all was written in between, which the server itself does when it starts.
    """
    store = open_store(cluster.info)
    since = (await store.list(Secret, namespace="default")).version
    seen: list[str] = []
    first, all_seen = asyncio.Event(), asyncio.Event()

    def note(found: Secret) -> None:
        if found.metadata.name in ("w1", "w2", "w3", "w4"):
            seen.append(found.metadata.name)
            first.set()
            if len(set(seen)) == 4:
                all_seen.set()

    async def follow(since: str) -> None:
        while True:
            try:
                async with aclosing(
                    store.watch(Secret, since=since, namespace="default")
                ) as events:
                    async for event in events:
                        if event.object is not None and event.change is Change.ADDED:
                            note(event.object)
            except GoneError:
                seen.clear()
                listed = await store.list(Secret, namespace="default")
                since = listed.version
                for each in listed.items:
                    note(each)

    async with asyncio.timeout(PATIENCE_SECONDS), asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(follow(since), name="follow")
        await write(store, "w1")
        await first.wait()
        await restart(cluster)
        await write(store, "w2", "w3", "w4")
        await all_seen.wait()
        watching.cancel()
    await store.close()
    assert seen == ["w1", "w2", "w3", "w4"]


async def test_a_request_is_retried_while_the_server_restarts(cluster: KubeCluster) -> None:
    usual = open_store(cluster.info)
    await usual.close()
    patient = ClientSettings(tries=1000, longest_wait_seconds=1.0)
    store = KubernetesStore.open(usual.client.access, patient)
    await write(store, "before")
    cluster.stop_process("kube-apiserver")
    reading = asyncio.ensure_future(store.get(Secret, Key("default", "before")))
    await asyncio.sleep(0)
    cluster.start_process("kube-apiserver")
    async with asyncio.timeout(PATIENCE_SECONDS):
        found = await reading
        await asyncio.to_thread(cluster.wait_ready)
    await store.close()
    assert found.metadata.name == "before"


async def test_a_compacted_version_is_gone(cluster: KubeCluster) -> None:
    store = open_store(cluster.info)
    since = (await store.list(Secret, namespace="default")).version
    await write(store, "c1", "c2", "c3")
    await asyncio.to_thread(cluster.compact_etcd)
    await restart(cluster)  # also clears the watch cache of the server
    watch = store.watch(Secret, since=since)
    async with asyncio.timeout(PATIENCE_SECONDS), aclosing(watch) as events:
        with pytest.raises(GoneError):
            await anext(events)
    listed = await store.list(Secret, namespace="default")
    assert {"c1", "c2", "c3"} <= {item.metadata.name for item in listed.items}
    await store.close()


async def test_a_compacted_page_is_gone_and_a_whole_list_is_not(
    cluster: KubeCluster,
) -> None:
    store = open_store(cluster.info)
    await write(store, *(f"p{number}" for number in range(6)))
    page = await store.list(Secret, namespace="default", limit=2)
    await write(store, "later")
    await asyncio.to_thread(cluster.compact_etcd)
    await restart(cluster)
    with pytest.raises(GoneError):
        await store.list(Secret, namespace="default", limit=2, continue_token=page.continue_token)
    whole = await store.list(Secret, namespace="default")
    assert "later" in {item.metadata.name for item in whole.items}
    await store.close()


async def test_a_network_that_drops_all_data_causes_timeouts_only(
    cluster: KubeCluster,
) -> None:
    direct = open_store(cluster.info)
    since = (await direct.list(Secret, namespace="default")).version
    seen: list[str] = []
    async with stalling_proxy(cluster.info.server) as network:
        access = structs.replace(direct.client.access, server=network.url)
        patient = ClientSettings(timeout_seconds=PATIENCE_SECONDS, watch_silence_seconds=1.0)
        store = KubernetesStore.open(access, patient)

        async def follow() -> None:
            async with aclosing(store.watch(Secret, since=since, namespace="default")) as events:
                async for event in events:
                    if event.object is not None:
                        seen.append(event.object.metadata.name)

        async with asyncio.timeout(PATIENCE_SECONDS), asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(follow(), name="follow")
            await write(direct, "n1")
            await until(lambda: seen == ["n1"])
            assert await store.get(Secret, Key("default", "n1"))  # opens a connection
            network.shut()
            store.client.settings = structs.replace(patient, timeout_seconds=SILENCE_SECONDS)
            # The wait for this response is longer than the silence limit of the watch.
            with pytest.raises(DeadlineExceededError):
                await store.get(Secret, Key("default", "n1"))
            await write(direct, "n2", "n3")
            network.open()
            store.client.settings = patient
            await until(lambda: seen == ["n1", "n2", "n3"])
            assert await store.get(Secret, Key("default", "n3"))
            watching.cancel()
        await store.close()
    await direct.close()


async def until(check: Callable[[], bool]) -> None:
    while not check():
        await asyncio.sleep(0.02)
