"""Waiters for the pod of a sandbox, and the events of its changes."""

import asyncio
from types import SimpleNamespace

import msgspec
import pytest

from paddock.resources.kinds.pods import Pod
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


def restarted(count: int, **last: object) -> Pod:
    """Return a running pod whose sidecar was restarted so often."""
    owner = {"apiVersion": "v", "kind": "Sandbox", "name": "x", "uid": "u1", "controller": True}
    sidecar = {"name": names.ENVD, "state": {"running": {}}, "restartCount": count}
    plain = {
        "metadata": {"name": "x", "labels": {names.LABEL_UID: "u1"}, "ownerReferences": [owner]},
        "status": {
            "phase": "Running",
            "podIP": "10.0.0.1",
            "containerStatuses": [{"name": names.MAIN, "state": {"running": {}}}],
            "initContainerStatuses": [
                sidecar | ({"lastState": {"terminated": last}} if last else {})
            ],
        },
    }
    return msgspec.convert(plain, Pod)


@pytest.mark.parametrize(("reason", "kills"), [("OOMKilled", 1), ("Error", None)])
async def test_a_sidecar_killed_for_memory_is_an_event(reason: str, kills: int | None):
    cluster = FakeCluster()
    watch = PodWatch(SimpleNamespace(subscribe=cluster.handlers.append))
    cluster.tell(None, restarted(0))
    events = watch.watch()
    seen = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    killed = restarted(1, reason=reason, exitCode=137)
    cluster.tell(restarted(0), killed)
    cluster.tell(killed, killed)  # the kubelet reports the same status again
    await asyncio.sleep(0)
    if kills is None:
        assert not seen.done()
        seen.cancel()
        return
    event = await seen
    assert (event.state, event.memory_kills) == (InstanceState.RUNNING, kills)
    assert event.reason == "processes were killed: the sandbox used its memory"
    again = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    assert not again.done()
    again.cancel()
