"""Resizing of running pods, and detection of whether the cluster supports it."""

import json

import msgspec
import pytest

from paddock.kit.errors import InvalidError, UnsupportedError
from paddock.runtime.kubernetes.pods.resize import (
    GRANT_SECONDS,
    ResizedPod,
    Resizer,
    pending_reason,
    resize_patch,
)
from paddock.runtime.port import Limits

BIG = Limits(cpu_millis=1000, memory_bytes=1 << 30)
MORE = Limits(cpu_millis=1000, memory_bytes=2 << 30)
LESS = Limits(cpu_millis=1000, memory_bytes=1 << 29)
SMALL = Limits(cpu_millis=500, memory_bytes=1 << 30)


def condition(kind, reason=""):
    return {"type": kind, "status": "True", "reason": reason, "message": "said so"}


class Server:
    """An API server of a given version."""

    def __init__(self, minor="37", *, serves=True, refuses=False):
        self._minor = minor
        self._serves = serves
        self._refuses = refuses
        self.patches = {}
        self.statuses = [{"observedGeneration": 2}]
        """Statuses of the pod, one per read; the last one repeats."""

    async def request(self, verb, path, *, resource="", body=None, content_type=""):
        if path == "/version":
            return json.dumps({"major": "1", "minor": self._minor}).encode()
        if path == "/api/v1":
            names = ["pods", "pods/status", *(["pods/resize"] if self._serves else [])]
            return json.dumps({"resources": [{"name": name} for name in names]}).encode()
        if verb == "GET":
            status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
            return json.dumps({"metadata": {"generation": 2}, "status": status}).encode()
        if self._refuses:
            raise InvalidError("only cpu and memory resources are mutable")
        assert verb == "PATCH"
        self.patches[path] = json.loads(body)
        return b'{"metadata": {"generation": 2}}'


async def resizer(server, *, has_pod_limits=True):
    made = Resizer(server, has_pod_limits=has_pod_limits)
    await made.detect()
    return made


@pytest.mark.parametrize(
    ("minor", "serves", "has_pod_limits", "able"),
    [
        ("37", True, True, True),
        ("36+", True, True, True),
        ("35", True, True, False),
        ("33", True, False, True),
        ("32", False, False, False),
        ("", False, True, False),
    ],
)
async def test_support_is_detected_from_version_and_discovery(minor, serves, has_pod_limits, able):
    made = await resizer(Server(minor, serves=serves), has_pod_limits=has_pod_limits)
    assert made.is_supported is able
    assert made.can_resize(BIG, SMALL) is able


async def test_only_cpu_and_memory_that_have_a_limit_are_resized():
    made = await resizer(Server())
    for wanted in (SMALL, BIG, MORE, LESS):
        assert made.can_resize(BIG, wanted)
        assert made.can_resize(SMALL, wanted)
    assert not made.can_resize(BIG, Limits(cpu_millis=500, memory_bytes=1 << 30, disk_bytes=1))
    assert not made.can_resize(Limits(), SMALL), "a limit cannot be added"
    assert not made.can_resize(BIG, Limits(cpu_millis=500)), "a limit cannot be removed"


async def test_without_observed_generation_only_less_cpu_is_possible():
    made = await resizer(Server("33"), has_pod_limits=False)
    assert made.can_resize(BIG, SMALL)
    assert not made.can_resize(SMALL, BIG)
    assert not made.can_resize(BIG, MORE)
    assert not made.can_resize(BIG, LESS)


@pytest.mark.looptime
async def test_a_memory_resize_waits_for_the_node():
    server = Server()
    server.statuses = [
        {"observedGeneration": 1},
        {"observedGeneration": 2, "conditions": [condition("PodResizeInProgress")]},
        {"observedGeneration": 2, "conditions": [{"type": "Ready", "status": "True"}]},
    ]
    await (await resizer(server)).resize("team", "box", MORE, before=BIG)
    [patch] = server.patches.values()
    assert patch["spec"]["resources"]["limits"]["memory"] == str(MORE.memory_bytes)
    assert len(server.statuses) == 1, "it was read until it was granted"


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("found", "message"),
    [
        (condition("PodResizePending", "Deferred"), "the node cannot resize the pod now: said so"),
        (condition("PodResizePending", "Infeasible"), "the node can never resize the pod: said so"),
        (condition("PodResizeInProgress", "Error"), "could not resize it: said so"),
        (condition("PodResizeInProgress"), f"not resized within {GRANT_SECONDS:g} s: .*said so"),
    ],
)
async def test_a_node_that_refuses_a_size_is_reported(found, message):
    server = Server()
    server.statuses = [{"observedGeneration": 2, "conditions": [found]}]
    with pytest.raises(UnsupportedError, match=message):
        await (await resizer(server)).resize("team", "box", MORE, before=BIG)


def test_conditions_of_an_earlier_generation_are_ignored():
    old = condition("PodResizePending", "Infeasible") | {"observedGeneration": 1}
    pod = {"status": {"observedGeneration": 2, "conditions": [old]}}
    assert pending_reason(msgspec.convert(pod, ResizedPod), 2) is None


async def test_limits_of_the_pod_or_of_both_containers_are_patched():
    server = Server()
    await (await resizer(server)).resize("team", "box", SMALL, before=BIG)
    assert server.patches["/api/v1/namespaces/team/pods/box/resize"]["spec"]["resources"] == {
        "limits": {"cpu": "500m", "memory": str(1 << 30)},
        "requests": {"cpu": "50m", "memory": str(1 << 28)},
    }
    spec = resize_patch(SMALL, has_pod_limits=False)["spec"]
    assert [item["name"] for item in spec["containers"]] == ["sandbox"]
    assert [item["name"] for item in spec["initContainers"]] == ["envd"]


async def test_a_rejection_has_a_hint():
    made = await resizer(Server(refuses=True))
    with pytest.raises(UnsupportedError, match="rejects the resize of pod team/box") as refused:
        await made.resize("team", "box", SMALL, before=BIG)
    assert "the template's own size" in (refused.value.hint or "")
