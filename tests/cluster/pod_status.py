"""The status that the fake kubelet reports for its pods."""

import hashlib
import random
from datetime import UTC, datetime
from typing import Any

from paddock.resources.kinds.pods import PodManifest


class RunningPod:
    """The kubelet's state of a running pod."""

    def __init__(self, pod: PodManifest, address: str) -> None:
        self.pod = pod
        """The latest version of the pod."""
        self.address = address
        self.image = main_of(pod)["image"]
        self.size = size_of(pod)
        self.restarts = 0
        self.since = self.started = _now()
        self.container = _container_id()
        self.resizing: list[dict[str, Any]] = []
        """Conditions of a resize."""

    def replace_main(self) -> None:
        """Record that its main container was replaced."""
        self.restarts += 1
        self.started = _now()
        self.container = _container_id()

    def status(self, *, resizes: bool) -> dict[str, Any]:
        """Return the status of the running pod."""
        runs = {"running": {"startedAt": self.started}}
        main = _container("sandbox", runs) | {
            "image": normal(self.image),
            "imageID": f"sha256:{hashlib.sha256(self.image.encode()).hexdigest()}",
            "containerID": self.container,
            "restartCount": self.restarts,
        }
        if resizes:
            # The API server takes this field as a sign that the kubelet supports resize.
            main["resources"] = main_of(self.pod).get("resources", {})
        return {
            "phase": "Running",
            "observedGeneration": self.pod.metadata.generation,
            "hostIP": "127.0.0.1",
            "podIP": self.address,
            "podIPs": [{"ip": self.address}],
            "startTime": self.since,
            "conditions": [{"type": "PodScheduled", "status": "True"}, *self.resizing],
            "initContainerStatuses": [_container("envd", runs)],
            "containerStatuses": [main],
        }

    def ended(self, code: int) -> dict[str, Any]:
        """Return the status of the ended pod, with the id of its last main container."""
        status = _ended(code, self.address)
        status["containerStatuses"][0]["containerID"] = self.container
        return status


def main_of(pod: PodManifest) -> dict[str, Any]:
    """Return the spec of the main container."""
    return pod.spec["containers"][0]


def size_of(pod: PodManifest) -> list[Any]:
    """Return the resources of the pod's spec."""
    parts = (*pod.spec["containers"], *pod.spec.get("initContainers", ()))
    return [pod.spec.get("resources"), *(part.get("resources") for part in parts)]


def normal(image: str) -> str:
    """Return the full name of an image, as kubelets report it."""
    return image if "/" in image else f"docker.io/library/{image}"


def _container_id() -> str:
    return f"containerd://{random.Random().randbytes(32).hex()}"


def _container(name: str, state: dict[str, Any]) -> dict[str, Any]:
    runs = "running" in state
    return {
        "name": name,
        "image": "base",
        "imageID": "",
        "ready": runs,
        "started": runs,
        "restartCount": 0,
        "state": state,
    }


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def waiting(reason: str, message: str) -> dict[str, Any]:
    """Return the status of a pod that is waiting."""
    waits = {"waiting": {"reason": reason, "message": message}}
    return {"phase": "Pending", "containerStatuses": [_container("sandbox", waits)]}


def _ended(code: int, address: str) -> dict[str, Any]:
    code = code if code >= 0 else 128 - code
    ended = {"terminated": {"exitCode": code, "reason": "Error", "finishedAt": _now()}}
    return {
        "phase": "Failed",
        "podIP": address,
        "podIPs": [{"ip": address}],
        "initContainerStatuses": [_container("envd", ended)],
        "containerStatuses": [_container("sandbox", ended)],
    }
