"""Change the image of a running pod in place: only its main container is replaced.

A kubelet ends a container whose image was changed and starts it from the new image, whatever the
restart policy. The sidecar exits with the old container and enters the new one. The same patch
records the old container in an annotation, so that it is not mistaken for the new one, also by the
next leader. A container that fails to start again stays failed, because pods of sandboxes have
restart policy Never; only the kubelet's events say why.
"""

import asyncio
from typing import Any
from urllib.parse import urlencode

import msgspec

from paddock.kit.errors import ForbiddenError, InvalidError, PaddockError, UnsupportedError
from paddock.resources import codec
from paddock.resources.kinds.pods import Pod
from paddock.runtime.kubernetes import names
from paddock.runtime.kubernetes.cluster import ApiClient
from paddock.runtime.kubernetes.pods import status

STRATEGIC_MERGE_PATCH = "application/strategic-merge-patch+json"
_EVENT_READS, _EVENT_READ_SECONDS = 4, 0.5
"""Events of a kubelet may arrive later than the status of the pod."""


class ImageUpdater:
    """Replaces the image of the main container of pods."""

    def __init__(self, server: ApiClient) -> None:
        self._server = server

    async def begin(self, pod: Pod, image: str, *, main: str) -> Pod:
        """Patch the image. `main` is the sidecar's id of the current main container."""
        try:
            response = await self._server.request(
                "PATCH",
                f"/api/v1/namespaces/{pod.metadata.namespace}/pods/{pod.metadata.name}",
                resource="pods",
                body=msgspec.json.encode(image_patch(pod, image, main=main)),
                content_type=STRATEGIC_MERGE_PATCH,
            )
        except (InvalidError, ForbiddenError) as error:
            raise UnsupportedError(
                f"the cluster rejects a new image for pod {pod.key}: {error.message}",
                hint="use a template of that image",
            ) from error
        return codec.decode(Pod, response)

    async def last_warning(self, pod: Pod) -> str:
        """Return the kubelet's last warning about a pod, or an empty string."""
        query = urlencode({"fieldSelector": f"involvedObject.uid={pod.metadata.uid},type=Warning"})
        path = f"/api/v1/namespaces/{pod.metadata.namespace}/events?{query}"
        for _ in range(_EVENT_READS):
            try:
                found = await self._server.request("GET", path, resource="events")
            except PaddockError as error:
                return f"the events of the pod cannot be read: {error.message}"
            if message := failure_message(msgspec.json.decode(found).get("items") or ()):
                return message
            await asyncio.sleep(_EVENT_READ_SECONDS)
        return ""


def image_patch(pod: Pod, image: str, *, main: str) -> dict[str, Any]:
    """Return the patch of a pod: image, incarnation, and the id of the replaced container."""
    former = status.main_status(pod)
    before = f"{former.container_id if former else ''} {main}"
    marks = {
        names.ANNOTATION_REPLACED: before,
        names.ANNOTATION_INCARNATION: str(status.incarnation(pod) + 1),
    }
    return {
        # The uid is a precondition: the patch must not hit a recreated pod of this name.
        "metadata": {"uid": pod.metadata.uid, "annotations": marks},
        "spec": {"containers": [{"name": names.MAIN, "image": image}]},
    }


def failure_message(events: Any) -> str:
    """Return the most specific failure: what the kubelet could not pull or start."""
    failed = [str(item.get("message", "")) for item in events if item.get("reason") == "Failed"]
    # The "Error: ErrImagePull" that follows is less specific.
    telling = [text for text in failed if text and not text.startswith("Error: ")]
    return (telling or failed or [""])[-1]
