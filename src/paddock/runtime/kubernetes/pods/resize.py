"""Another size for a pod that runs, without making it anew: the `resize` subresource.

Less CPU is what every node grants at once. Whether more of it, or another amount of memory, was
granted is for the node to say: a node may be full (deferred), too small (infeasible), or find that
more memory is in use than is left. Whoever asked is told so and takes another pod. Whether a
cluster resizes in place is read from what it serves; elsewhere a sandbox of another size is made
anew.
"""

import asyncio
import re
from typing import Any

import msgspec
from msgspec import Struct

from paddock.kit.errors import ForbiddenError, InvalidError, UnsupportedError
from paddock.runtime.kubernetes import names
from paddock.runtime.kubernetes.cluster import Asking
from paddock.runtime.kubernetes.pods.render import requests_and_limits
from paddock.runtime.port import Limits

_STRATEGIC = "application/strategic-merge-patch+json"
_WHOLE_PODS_SINCE = (1, 36)
"""Since when limits of a pod as a whole can be changed; those of containers: where it is served."""
_ANSWERS_SINCE = (1, 34)
"""Since when kubelets say which generation of a pod they speak of."""
GRANT_SECONDS = 10.0
"""So long a node may take to say yes."""
_FIRST_LOOK, _LONGEST_LOOK = 0.05, 0.5
_UNSEEN = "its node has not looked at it yet"
_HINT = "ask for the template's own size"


class _Condition(Struct, frozen=True, rename="camel"):
    type: str = ""
    reason: str = ""
    message: str = ""
    observed_generation: int = 0


class _Status(Struct, frozen=True, rename="camel"):
    observed_generation: int = 0
    conditions: tuple[_Condition, ...] = ()


class _Metadata(Struct, frozen=True):
    generation: int = 0


class ResizedPod(Struct, frozen=True):
    """What a pod says of its size."""

    metadata: _Metadata = _Metadata()
    status: _Status = _Status()


class Resizer:
    """Changes the size of pods, where the cluster can."""

    def __init__(self, server: Asking, *, has_pod_limits: bool) -> None:
        self._server = server
        self._has_pod_limits = has_pod_limits
        self.is_able = False
        self._answers = False

    async def look(self) -> None:
        """Find out whether this cluster resizes in place; one that does not say does not."""
        served = msgspec.json.decode(await self._server.request("GET", "/api/v1"))
        has_it = any(item.get("name") == "pods/resize" for item in served.get("resources", ()))
        version = _version(msgspec.json.decode(await self._server.request("GET", "/version")))
        self.is_able = has_it and (not self._has_pod_limits or version >= _WHOLE_PODS_SINCE)
        self._answers = version >= _ANSWERS_SINCE

    def can(self, now: Limits, wanted: Limits) -> bool:
        """Say whether a pod of one size may become one of the other without being made anew."""
        same = (now.disk_bytes, now.pids) == (wanted.disk_bytes, wanted.pids)
        # What has a limit keeps one, and what has none gets none: Kubernetes wants it so.
        kept = bool(now.cpu_millis) == bool(wanted.cpu_millis) and (
            bool(now.memory_bytes) == bool(wanted.memory_bytes)
        )
        if not self.is_able or not same or not kept:
            return False
        return self._answers or is_sure(now, wanted)

    async def resize(self, namespace: str, name: str, limits: Limits, *, before: Limits) -> None:
        """Give a pod another size; return when its node has granted it."""
        path = f"/api/v1/namespaces/{namespace}/pods/{name}/resize"
        body = msgspec.json.encode(resize_patch(limits, has_pod_limits=self._has_pod_limits))
        try:
            answer = await self._server.request(
                "PATCH", path, resource="pods", body=body, content_type=_STRATEGIC
            )
        except (InvalidError, ForbiddenError) as error:
            # Its node may be older than the API server, or have the feature switched off.
            raise UnsupportedError(
                f"the cluster refuses to resize pod {namespace}/{name}: {error.message}",
                hint=_HINT,
            ) from error
        if not is_sure(before, limits):
            asked = msgspec.json.decode(answer, type=ResizedPod)
            await self._until_granted(path, asked.metadata.generation)

    async def _until_granted(self, path: str, generation: int) -> None:
        pause, said = _FIRST_LOOK, _UNSEEN
        try:
            async with asyncio.timeout(GRANT_SECONDS):
                while said is not None:
                    await asyncio.sleep(pause)
                    pause = min(pause * 1.5, _LONGEST_LOOK)
                    found = await self._server.request("GET", path, resource="pods")
                    said = missing(msgspec.json.decode(found, type=ResizedPod), generation)
        except TimeoutError as error:
            raise UnsupportedError(
                f"the pod was not resized within {GRANT_SECONDS:g} s: {said}", hint=_HINT
            ) from error


def is_sure(now: Limits, wanted: Limits) -> bool:
    """Say whether every node grants this at once: less CPU, and the same of everything else."""
    same = now.memory_bytes == wanted.memory_bytes
    return same and (wanted.cpu_millis or 0) <= (now.cpu_millis or 0)


def missing(pod: ResizedPod, generation: int) -> str | None:
    """Say what a resize still waits for; `UnsupportedError` where its node refuses."""
    if pod.status.observed_generation < generation:
        return _UNSEEN
    for condition in pod.status.conditions:
        said = condition.message or condition.reason
        if 0 < condition.observed_generation < generation:
            continue  # of an earlier wish
        if condition.type == "PodResizePending":
            when = "never" if condition.reason == "Infeasible" else "not now"
            raise UnsupportedError(f"its node can {when} grant that size: {said}", hint=_HINT)
        if condition.type == "PodResizeInProgress":
            if condition.reason == "Error":
                raise UnsupportedError(f"its node could not resize it: {said}", hint=_HINT)
            return f"its node is at it: {said or 'it does not say more'}"
    return None


def resize_patch(limits: Limits, *, has_pod_limits: bool) -> dict[str, Any]:
    """Say what changes of a pod: as a whole, or of both containers alike."""
    size = requests_and_limits(limits)
    if has_pod_limits:
        return {"spec": {"resources": size}}
    return {
        "spec": {
            "containers": [{"name": names.MAIN, "resources": size}],
            "initContainers": [{"name": names.ENVD, "resources": size}],
        }
    }


def _version(answer: Any) -> tuple[int, int]:
    # Some distributions write "36+".
    found = [re.match(r"\d+", str(answer.get(part, ""))) for part in ("major", "minor")]
    major, minor = (int(match[0]) if match else 0 for match in found)
    return major, minor
