"""Several concurrent waiters for the pod of a sandbox."""

import asyncio
from types import SimpleNamespace

from paddock.resources.meta import ObjectMeta, OwnerReference
from paddock.runtime.kubernetes import names
from paddock.runtime.kubernetes.pods.watch import PodWatch
from paddock.runtime.port import InstanceState
from tests.runtime.kubernetes.test_driver import FakeCluster


async def test_a_cancelled_waiter_does_not_affect_the_others():
    cluster = FakeCluster()
    watch = PodWatch(SimpleNamespace(subscribe=cluster.handlers.append))
    first, second = (asyncio.create_task(watch.wait_running("u1")) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    owner = OwnerReference(api_version="v", kind="Sandbox", name="x", uid="u1", controller=True)
    labels = {names.LABEL_UID: "u1"}
    meta = ObjectMeta(name="x", namespace="team", labels=labels, owner_references=(owner,))
    cluster.tell(None, cluster.running(meta))
    async with asyncio.timeout(5):
        assert (await second).state is InstanceState.RUNNING
