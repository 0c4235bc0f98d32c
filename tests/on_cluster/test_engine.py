"""The engine on a real API server: leases, events and informers, with a client per replica."""

import asyncio
import subprocess
from collections.abc import Callable
from contextlib import AsyncExitStack

import pytest
from msgspec import structs

from paddock.engine.election import Elector, Timing
from paddock.engine.informer import Informer
from paddock.engine.recorder import Recorder
from paddock.kit.tasks import background
from paddock.resources.kinds.builtin import Event, Lease
from paddock.resources.kinds.sandbox import LABEL_POOL, Sandbox, SandboxSpec
from paddock.resources.kinds.template import TemplateRef
from paddock.resources.meta import Key, ObjectMeta, with_meta
from paddock.store.kubernetes import KubernetesStore
from tests.cluster.info import ClusterInfo
from tests.store.kubernetes.conftest import open_store

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(180)]

PATIENCE_SECONDS = 60.0
LONG = Timing(lease_seconds=60.0, renew_seconds=40.0, retry_seconds=0.2)
"""Long enough that no lease expires on a slow machine."""
SHORT = Timing(lease_seconds=6.0, renew_seconds=3.0, retry_seconds=0.2)


def sandbox(ns: str, name: str, **labels: str) -> Sandbox:
    return Sandbox(
        metadata=ObjectMeta(namespace=ns, name=name, labels=labels),
        spec=SandboxSpec(template_ref=TemplateRef(name="base")),
    )


async def until(check: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not check():
            await asyncio.sleep(0.02)


class Replica:
    """One replica: a client, an elector, and whether it leads."""

    def __init__(
        self, info: ClusterInfo, ns: str, name: str, timing: Timing, diary: list[str]
    ) -> None:
        self.store = open_store(info)
        self.elector = Elector(self.store, Key(ns, "controllers"), name, timing=timing)
        self.works = False
        self._name = name
        self._diary = diary
        """The actions of all replicas, in order."""

    async def run(self) -> None:
        await self.elector.run(self._lead)

    async def _lead(self) -> None:
        self.works = True
        self._diary.append(f"{self._name} begins")
        try:
            await asyncio.Event().wait()
        finally:
            self.works = False
            self._diary.append(f"{self._name} stops")


async def test_leadership_is_handed_over_when_the_leader_stops(
    kube_cluster: ClusterInfo, kube_namespace: str
) -> None:
    one, two = (Replica(kube_cluster, kube_namespace, name, LONG, []) for name in ("one", "two"))
    async with AsyncExitStack() as first:
        await first.enter_async_context(background(one.run(), name="one"))
        await until(lambda: one.works)
        async with background(two.run(), name="two"):
            await until(lambda: two.elector.leader == "one")
            assert not two.works, "one leads, and one alone"
            await first.aclose()
            # It released the lease when it stopped: the next one need not wait for the expiry.
            await until(lambda: two.works)
            assert two.elector.term > 1
    held = await one.store.get(Lease, Key(kube_namespace, "controllers"))
    assert not held.spec.holder_identity, "given up by the last to leave"
    await one.store.close()
    await two.store.close()


async def test_a_leader_that_vanishes_is_replaced_when_its_lease_expires(
    kube_cluster: ClusterInfo, kube_namespace: str
) -> None:
    diary: list[str] = []
    one, two = (
        Replica(kube_cluster, kube_namespace, name, SHORT, diary) for name in ("one", "two")
    )
    async with background(one.run(), name="one"):
        await until(lambda: one.works)
        del diary[:-1]  # on a busy machine it may have lost the lease before
        async with background(two.run(), name="two"):
            await one.store.close()  # from here on it cannot reach the server
            await until(lambda: two.works)
    await two.store.close()
    begun = diary[: diary.index("two begins") + 1]
    assert begun == ["one begins", "one stops", "two begins"], "one after the other"


async def test_events_are_counted_and_shown_by_describe(
    kube_cluster: ClusterInfo, kube_namespace: str
) -> None:
    store = open_store(kube_cluster)
    made = await store.create(sandbox(kube_namespace, "a"))
    recorder = Recorder(store, "paddock-test", settle_seconds=0.1)
    async with background(recorder.run(), name="recorder"):
        for _ in range(3):
            recorder.warning(made, "ImageMissing", "cannot find image base")
        events = await counted(store, kube_namespace, 3)
    (event,) = events
    assert event.involved_object.uid == made.metadata.uid
    shown = subprocess.run(
        [
            kube_cluster.kubectl,
            f"--kubeconfig={kube_cluster.kubeconfig}",
            f"--namespace={kube_namespace}",
            "describe",
            "sandbox",
            "a",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "cannot find image base" in shown.stdout
    await store.close()


async def counted(store: KubernetesStore, ns: str, count: int) -> tuple[Event, ...]:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            events = (await store.list(Event, namespace=ns)).items
            if sum(event.count for event in events) == count:
                return events
            await asyncio.sleep(0.05)


async def test_an_informer_lists_in_pages_and_then_watches(
    kube_cluster: ClusterInfo, kube_namespace: str
) -> None:
    store = open_store(kube_cluster)
    await asyncio.gather(
        *(store.create(sandbox(kube_namespace, f"s{n:02}", **{LABEL_POOL: "p"})) for n in range(25))
    )
    informer = Informer(
        store,
        Sandbox,
        indexes={"pool": lambda obj: (obj.metadata.labels.get(LABEL_POOL, ""),)},
        page_size=10,
    )
    async with background(informer.run(), name="informer"):
        async with asyncio.timeout(PATIENCE_SECONDS):
            await informer.wait_synced()

        def mine() -> dict[str, Sandbox]:
            found = informer.by_index("pool", "p")
            return {o.metadata.name: o for o in found if o.metadata.namespace == kube_namespace}

        assert sorted(mine()) == [f"s{n:02}" for n in range(25)]
        changed = mine()["s00"]
        changed = await store.update(
            structs.replace(changed, spec=structs.replace(changed.spec, paused=True))
        )
        await store.delete(Sandbox, Key(kube_namespace, "s01"))
        moved = with_meta(mine()["s02"], labels={LABEL_POOL: "q"})
        await store.update(moved)
        await until(lambda: len(mine()) == 23 and mine()["s00"] == changed)
    await store.close()


async def test_a_deleted_object_is_not_visible_to_its_deleter(
    kube_cluster: ClusterInfo, kube_namespace: str
) -> None:
    """The server returns the last version, which is older than the watch."""
    store = open_store(kube_cluster)
    informer = Informer(store, Sandbox)
    made = with_meta(sandbox(kube_namespace, "a"), finalizers=("paddock.dev/test",))
    made = await store.create(made)
    async with background(informer.run(), name="informer"):
        await store.delete(Sandbox, made.key, uid=made.metadata.uid)
        await store.create(sandbox(kube_namespace, "later"))
        await until(lambda: informer.get(Key(kube_namespace, "later")) is not None)
        dying = informer.get(made.key)
        assert dying is not None
        ended = await store.update(with_meta(dying, finalizers=()))
        informer.observe(ended)
        assert informer.get(made.key) is None
        assert ended.metadata.resource_version == dying.metadata.resource_version
    await store.close()
