"""Resize a running pod in place through the `resize` subresource.

Every node grants less CPU at once. More CPU or another amount of memory needs the node's consent: a
node may be full (deferred), too small (infeasible), or the pod may use more memory than the new
limit. The caller then gets an error and uses another pod. `detect` reads from the API server
whether the cluster supports resizing; if not, a sandbox of another size needs a new pod.
"""

import asyncio
import re
from typing import Any

import msgspec
from msgspec import Struct

from paddock.kit.errors import ForbiddenError, InvalidError, UnsupportedError
from paddock.runtime.kubernetes import names
from paddock.runtime.kubernetes.cluster import ApiClient
from paddock.runtime.kubernetes.pods.render import requests_and_limits
from paddock.runtime.port import Limits

_STRATEGIC_MERGE_PATCH = "application/strategic-merge-patch+json"
_WHOLE_PODS_SINCE = (1, 36)
"""First version that can resize pod-level limits; container limits: where `resize` is served."""
_GENERATION_SINCE = (1, 34)
"""First version whose kubelets report the observed generation of a pod."""
GRANT_SECONDS = 10.0
"""Timeout for a node to grant a resize."""
_FIRST_DELAY, _MAX_DELAY = 0.05, 0.5
_NOT_OBSERVED = "its node has not observed the change yet"
_HINT = "use the template's own size"


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
    """The fields of a pod that show the progress of a resize."""

    metadata: _Metadata = _Metadata()
    status: _Status = _Status()


class Resizer:
    """Resizes pods where the cluster supports it."""

    def __init__(self, server: ApiClient, *, has_pod_limits: bool) -> None:
        self._server = server
        self._has_pod_limits = has_pod_limits
        self.is_supported = False
        self._reports_generation = False

    async def detect(self) -> None:
        """Detect whether the API server serves `pods/resize`."""
        served = msgspec.json.decode(await self._server.request("GET", "/api/v1"))
        has_it = any(item.get("name") == "pods/resize" for item in served.get("resources", ()))
        version = _version(msgspec.json.decode(await self._server.request("GET", "/version")))
        self.is_supported = has_it and (not self._has_pod_limits or version >= _WHOLE_PODS_SINCE)
        self._reports_generation = version >= _GENERATION_SINCE

    def can_resize(self, now: Limits, wanted: Limits) -> bool:
        """Whether a pod can be resized from `now` to `wanted` in place."""
        same = (now.disk_bytes, now.pids) == (wanted.disk_bytes, wanted.pids)
        # Kubernetes allows neither adding nor removing a limit.
        kept = bool(now.cpu_millis) == bool(wanted.cpu_millis) and (
            bool(now.memory_bytes) == bool(wanted.memory_bytes)
        )
        if not self.is_supported or not same or not kept:
            return False
        return self._reports_generation or is_always_granted(now, wanted)

    async def resize(self, namespace: str, name: str, limits: Limits, *, before: Limits) -> None:
        """Resize a pod; return when its node has granted it."""
        path = f"/api/v1/namespaces/{namespace}/pods/{name}/resize"
        body = msgspec.json.encode(resize_patch(limits, has_pod_limits=self._has_pod_limits))
        try:
            response = await self._server.request(
                "PATCH", path, resource="pods", body=body, content_type=_STRATEGIC_MERGE_PATCH
            )
        except (InvalidError, ForbiddenError) as error:
            # Its node may be older than the API server, or have the feature disabled.
            raise UnsupportedError(
                f"the cluster rejects the resize of pod {namespace}/{name}: {error.message}",
                hint=_HINT,
            ) from error
        if not is_always_granted(before, limits):
            resized = msgspec.json.decode(response, type=ResizedPod)
            await self._wait_granted(path, resized.metadata.generation)

    async def _wait_granted(self, path: str, generation: int) -> None:
        pause, reason = _FIRST_DELAY, _NOT_OBSERVED
        try:
            async with asyncio.timeout(GRANT_SECONDS):
                while reason is not None:
                    await asyncio.sleep(pause)
                    pause = min(pause * 1.5, _MAX_DELAY)
                    found = await self._server.request("GET", path, resource="pods")
                    reason = pending_reason(msgspec.json.decode(found, type=ResizedPod), generation)
        except TimeoutError as error:
            raise UnsupportedError(
                f"the pod was not resized within {GRANT_SECONDS:g} s: {reason}", hint=_HINT
            ) from error


def is_always_granted(now: Limits, wanted: Limits) -> bool:
    """Whether every node grants this at once: no more CPU, and the same memory."""
    same = now.memory_bytes == wanted.memory_bytes
    return same and (wanted.cpu_millis or 0) <= (now.cpu_millis or 0)


def pending_reason(pod: ResizedPod, generation: int) -> str | None:
    """Return what a resize is waiting for, or `None`. Raises `UnsupportedError` if refused."""
    if pod.status.observed_generation < generation:
        return _NOT_OBSERVED
    for condition in pod.status.conditions:
        reason = condition.message or condition.reason
        if 0 < condition.observed_generation < generation:
            continue  # of an earlier resize
        if condition.type == "PodResizePending":
            is_final = condition.reason == "Infeasible"
            what = "can never resize the pod" if is_final else "cannot resize the pod now"
            raise UnsupportedError(f"the node {what}: {reason}", hint=_HINT)
        if condition.type == "PodResizeInProgress":
            if condition.reason == "Error":
                raise UnsupportedError(f"its node could not resize it: {reason}", hint=_HINT)
            return f"its node is resizing it: {reason or 'no details'}"
    return None


def resize_patch(limits: Limits, *, has_pod_limits: bool) -> dict[str, Any]:
    """Return the patch: limits of the pod, or the same limits on both containers."""
    size = requests_and_limits(limits)
    if has_pod_limits:
        return {"spec": {"resources": size}}
    return {
        "spec": {
            "containers": [{"name": names.MAIN, "resources": size}],
            "initContainers": [{"name": names.ENVD, "resources": size}],
        }
    }


def _version(response: Any) -> tuple[int, int]:
    # Some distributions report "36+".
    found = [re.match(r"\d+", str(response.get(part, ""))) for part in ("major", "minor")]
    major, minor = (int(match[0]) if match else 0 for match in found)
    return major, minor
