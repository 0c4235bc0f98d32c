"""Which sizes a running pod is given, and how a cluster is asked whether it can."""

import json

import msgspec
import pytest

from paddock.kit.errors import InvalidError, UnsupportedError
from paddock.runtime.kubernetes.pods.resize import (
    GRANT_SECONDS,
    ResizedPod,
    Resizer,
    missing,
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
    """An API server of some version."""

    def __init__(self, minor="37", *, serves=True, refuses=False):
        self._minor = minor
        self._serves = serves
        self._refuses = refuses
        self.patches = {}
        self.statuses = [{"observedGeneration": 2}]
        """What its node says of the pod, look by look; the last one for good."""

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
    await made.look()
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
async def test_a_cluster_resizes_where_it_says_so(minor, serves, has_pod_limits, able):
    made = await resizer(Server(minor, serves=serves), has_pod_limits=has_pod_limits)
    assert made.is_able is able
    assert made.can(BIG, SMALL) is able


async def test_only_cpu_and_memory_that_have_a_limit_are_resized():
    made = await resizer(Server())
    for wanted in (SMALL, BIG, MORE, LESS):
        assert made.can(BIG, wanted)
        assert made.can(SMALL, wanted)
    assert not made.can(BIG, Limits(cpu_millis=500, memory_bytes=1 << 30, disk_bytes=1))
    assert not made.can(Limits(), SMALL), "what has no limit keeps none"
    assert not made.can(BIG, Limits(cpu_millis=500)), "what has one keeps one"


async def test_nodes_that_do_not_answer_are_asked_only_for_what_all_can_grant():
    made = await resizer(Server("33"), has_pod_limits=False)
    assert made.can(BIG, SMALL)
    assert not made.can(SMALL, BIG)
    assert not made.can(BIG, MORE)
    assert not made.can(BIG, LESS)


@pytest.mark.looptime
async def test_other_memory_is_there_when_the_node_says_so():
    server = Server()
    server.statuses = [
        {"observedGeneration": 1},
        {"observedGeneration": 2, "conditions": [condition("PodResizeInProgress")]},
        {"observedGeneration": 2, "conditions": [{"type": "Ready", "status": "True"}]},
    ]
    await (await resizer(server)).resize("team", "box", MORE, before=BIG)
    [patch] = server.patches.values()
    assert patch["spec"]["resources"]["limits"]["memory"] == str(MORE.memory_bytes)
    assert len(server.statuses) == 1, "it was looked at until it was granted"


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("found", "told"),
    [
        (condition("PodResizePending", "Deferred"), "can not now grant that size: said so"),
        (condition("PodResizePending", "Infeasible"), "can never grant that size: said so"),
        (condition("PodResizeInProgress", "Error"), "could not resize it: said so"),
        (condition("PodResizeInProgress"), f"not resized within {GRANT_SECONDS:g} s: .*said so"),
    ],
)
async def test_a_node_that_does_not_grant_a_size_is_told_of(found, told):
    server = Server()
    server.statuses = [{"observedGeneration": 2, "conditions": [found]}]
    with pytest.raises(UnsupportedError, match=told):
        await (await resizer(server)).resize("team", "box", MORE, before=BIG)


def test_what_was_said_of_an_earlier_wish_does_not_count():
    old = condition("PodResizePending", "Infeasible") | {"observedGeneration": 1}
    pod = {"status": {"observedGeneration": 2, "conditions": [old]}}
    assert missing(msgspec.convert(pod, ResizedPod), 2) is None


async def test_a_pod_is_resized_as_a_whole_or_container_by_container():
    server = Server()
    await (await resizer(server)).resize("team", "box", SMALL, before=BIG)
    assert server.patches["/api/v1/namespaces/team/pods/box/resize"]["spec"]["resources"] == {
        "limits": {"cpu": "500m", "memory": str(1 << 30)},
        "requests": {"cpu": "50m", "memory": str(1 << 28)},
    }
    spec = resize_patch(SMALL, has_pod_limits=False)["spec"]
    assert [item["name"] for item in spec["containers"]] == ["sandbox"]
    assert [item["name"] for item in spec["initContainers"]] == ["envd"]


async def test_a_refusal_says_what_to_do():
    made = await resizer(Server(refuses=True))
    with pytest.raises(UnsupportedError, match="refuses to resize pod team/box") as refused:
        await made.resize("team", "box", SMALL, before=BIG)
    assert "the template's own size" in (refused.value.hint or "")
