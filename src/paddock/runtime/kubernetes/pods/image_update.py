"""Another image for a pod that runs, without making it anew: only its main container is replaced.

A kubelet ends a container whose image was changed and starts it again from the new one, whatever
the restart policy; the sidecar sees the former one end and follows. What was there before is
written to the pod in the same patch, so that nobody takes the old for the new, and whoever leads
next can go on. A container that could not be started again is over for good: pods of sandboxes
restart nothing, so the kubelet's events are the only ones to say why.
"""

import asyncio
from typing import Any
from urllib.parse import urlencode

import msgspec

from paddock.kit.errors import ForbiddenError, InvalidError, PaddockError, UnsupportedError
from paddock.resources import codec
from paddock.resources.kinds.pods import Pod
from paddock.runtime.kubernetes import names
from paddock.runtime.kubernetes.cluster import Asking
from paddock.runtime.kubernetes.pods import status

STRATEGIC = "application/strategic-merge-patch+json"
_LOOKS, _LOOK_SECONDS = 4, 0.5
"""A kubelet's events may be a moment later than its word about the pod."""


class ImageUpdates:
    """Replaces the main container's image of pods."""

    def __init__(self, server: Asking) -> None:
        self._server = server

    async def begin(self, pod: Pod, image: str, *, main: str) -> Pod:
        """Ask for another image; `main` is what the sidecar said of the container it is in now."""
        try:
            answer = await self._server.request(
                "PATCH",
                f"/api/v1/namespaces/{pod.metadata.namespace}/pods/{pod.metadata.name}",
                resource="pods",
                body=msgspec.json.encode(image_patch(pod, image, main=main)),
                content_type=STRATEGIC,
            )
        except (InvalidError, ForbiddenError) as error:
            raise UnsupportedError(
                f"the cluster refuses another image for pod {pod.key}: {error.message}",
                hint="use a template of that image",
            ) from error
        return codec.decode(Pod, answer)

    async def why_not(self, pod: Pod) -> str:
        """Say what the kubelet complained of last; empty where it did not."""
        asked = urlencode({"fieldSelector": f"involvedObject.uid={pod.metadata.uid},type=Warning"})
        path = f"/api/v1/namespaces/{pod.metadata.namespace}/events?{asked}"
        for _ in range(_LOOKS):
            try:
                found = await self._server.request("GET", path, resource="events")
            except PaddockError as error:
                return f"its events cannot be read: {error.message}"
            if said := complaint(msgspec.json.decode(found).get("items") or ()):
                return said
            await asyncio.sleep(_LOOK_SECONDS)
        return ""


def image_patch(pod: Pod, image: str, *, main: str) -> dict[str, Any]:
    """Say what changes of a pod: the image, its life, and what it was before."""
    former = status.main_status(pod)
    before = f"{former.container_id if former else ''} {main}"
    marks = {
        names.ANNOTATION_REPLACED: before,
        names.ANNOTATION_INCARNATION: str(status.incarnation(pod) + 1),
    }
    return {
        # The uid is a condition: a pod that was made anew under this name is another.
        "metadata": {"uid": pod.metadata.uid, "annotations": marks},
        "spec": {"containers": [{"name": names.MAIN, "image": image}]},
    }


def complaint(events: Any) -> str:
    """Give the most telling of a kubelet's complaints: what it could not pull or start."""
    failed = [str(item.get("message", "")) for item in events if item.get("reason") == "Failed"]
    # "Error: ErrImagePull" follows, and says less.
    telling = [text for text in failed if text and not text.startswith("Error: ")]
    return (telling or failed or [""])[-1]
