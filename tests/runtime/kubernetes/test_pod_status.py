"""The state of a sandbox as read from its pod's status."""

from datetime import UTC, datetime

import msgspec
import pytest

from paddock.resources.kinds.pods import Pod
from paddock.runtime.kubernetes.pods import status as pod_status
from paddock.runtime.port import InstanceState

S = InstanceState


def pod(status, **metadata):
    owner = {"apiVersion": "p/v1", "kind": "Sandbox", "name": "b", "uid": "u", "controller": True}
    plain = {
        "metadata": {"name": "b", "ownerReferences": [owner], **metadata},
        "spec": {"nodeName": "n"},
        "status": status,
    }
    return msgspec.convert(plain, Pod)


def main(**state):
    return {"containerStatuses": [{"name": "sandbox", "state": state}]}


RUNNING = {"phase": "Running", "podIP": "10.0.0.1", **main(running={})}


@pytest.mark.parametrize(
    ("status", "state", "reason"),
    [
        ({}, S.CREATING, "waits for its containers"),
        (RUNNING, S.RUNNING, None),
        ({**RUNNING, "podIP": ""}, S.CREATING, "waits"),
        (
            {
                "conditions": [
                    {
                        "type": "PodScheduled",
                        "status": "False",
                        "message": "0/3 nodes are available",
                    }
                ]
            },
            S.CREATING,
            "waits for a node: 0/3 nodes",
        ),
        (
            main(waiting={"reason": "ImagePullBackOff", "message": "no such image"}),
            S.FAILED,
            "container sandbox cannot start: ImagePullBackOff: no such image",
        ),
        (main(waiting={"reason": "ErrImagePull"}), S.CREATING, "waits: ErrImagePull"),
        (
            {"phase": "Failed", **main(terminated={"exitCode": 137, "reason": "OOMKilled"})},
            S.FAILED,
            "ran out of memory",
        ),
        (
            {"phase": "Failed", **main(terminated={"exitCode": 3, "message": "boom"})},
            S.FAILED,
            "container sandbox ended with exit code 3: boom",
        ),
        (
            {"phase": "Failed", "reason": "Evicted", "message": "disk pressure"},
            S.FAILED,
            "its pod ended: Evicted (disk pressure)",
        ),
        (
            {"phase": "Succeeded", **main(terminated={"exitCode": 0, "reason": "Completed"})},
            S.FAILED,
            "exit code 0",
        ),
    ],
)
def test_the_state_and_reason_follow_from_the_status(status, state, reason):
    found = pod_status.read(pod(status), "u").instance
    assert found.state is state
    assert (found.reason is None) if reason is None else reason in found.reason


def test_a_pod_that_is_being_deleted_has_failed():
    leaving = pod(RUNNING, deletionTimestamp=datetime(2026, 1, 1, tzinfo=UTC))
    assert pod_status.read(leaving, "u").instance.state is S.FAILED


def test_a_frozen_pod_keeps_its_address():
    frozen = pod(
        RUNNING, annotations={"paddock.dev/frozen": "true", "paddock.dev/incarnation": "3"}
    )
    found = pod_status.read(frozen, "u").instance
    assert (found.state, found.address.ip, found.incarnation) == (S.FROZEN, "10.0.0.1", 3)


def test_only_an_owner_reference_proves_ownership():
    assert pod_status.is_owned(pod({}), "u")
    assert not pod_status.is_owned(pod({}), "another")
    assert not pod_status.is_owned(pod({}, ownerReferences=[]), "u")


def test_a_crash_looping_envd_is_reported():
    waits = {"reason": "CrashLoopBackOff", "message": "back-off 40s restarting failed container"}
    envd = {"name": "envd", "state": {"waiting": waits}}
    assert pod_status.envd_wait_reason(pod({**RUNNING, "initContainerStatuses": [envd]})) == (
        "container envd waits: CrashLoopBackOff: back-off 40s restarting failed container"
    )
    assert pod_status.envd_wait_reason(pod(RUNNING)) == ""
