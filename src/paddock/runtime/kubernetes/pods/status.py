"""What a pod's status means for its sandbox: pure, and in words that people understand."""

from datetime import datetime

from msgspec import Struct

from paddock.resources.kinds.pods import ContainerStatus, Pod
from paddock.resources.meta import Resource
from paddock.runtime.kubernetes import names
from paddock.runtime.port import Address, Instance, InstanceState

_HOPELESS = frozenset(
    {
        "CreateContainerConfigError",
        "CreateContainerError",
        "ErrImageNeverPull",
        "ImagePullBackOff",
        "InvalidImageName",
        "RunContainerError",
    }
)
"""Reasons for waiting that waiting does not mend."""


class Reading(Struct, frozen=True):
    """A sandbox as its pod shows it."""

    instance: Instance
    is_answering: bool
    """Its envd can be spoken to."""


def is_owned(obj: Resource, uid: str) -> bool:
    """Say whether something was made for this sandbox: only its owner reference proves it."""
    return any(ref.uid == uid and ref.controller for ref in obj.metadata.owner_references)


def incarnation(pod: Pod) -> int:
    """Say in which life of its sandbox a pod was made."""
    text = pod.metadata.annotations.get(names.ANNOTATION_INCARNATION, "")
    return int(text) if text.isdigit() else 1


def image(pod: Pod) -> str:
    """Say what the main container is to run."""
    for container in pod.spec.containers:
        if container.name == names.MAIN:
            return container.image
    return ""


def main_status(pod: Pod) -> ContainerStatus | None:
    """Find what the kubelet says of the main container."""
    for status in pod.status.container_statuses:
        if status.name == names.MAIN:
            return status
    return None


def began(pod: Pod) -> datetime | None:
    """Say since when the main container is there, or else the pod."""
    status = main_status(pod)
    running = status.state.running if status is not None else None
    since = running.started_at if running is not None else None
    return since or pod.status.start_time or pod.metadata.creation_timestamp


def replaced(pod: Pod) -> tuple[str, str]:
    """Give the main container that is replaced by another, as kubelet and sidecar named it."""
    container, _, main = pod.metadata.annotations.get(names.ANNOTATION_REPLACED, "").partition(" ")
    return container, main


def is_replacing(pod: Pod) -> bool:
    """Say whether the kubelet still shows the container that is to be replaced."""
    status = main_status(pod)
    former, _ = replaced(pod)
    return bool(former) and status is not None and status.container_id == former


def read(pod: Pod, uid: str) -> Reading:
    """Say what a pod shows."""
    state, reason = _state(pod)
    runs = state in (InstanceState.RUNNING, InstanceState.FROZEN)
    instance = Instance(
        uid=uid,
        state=state,
        address=address(pod) if runs else Address(),
        reason=reason,
        started_at=pod.status.start_time,
        image=image(pod),
        node_name=pod.spec.node_name or None,
        incarnation=incarnation(pod),
    )
    return Reading(instance, is_answering=_has_envd(pod))


def address(pod: Pod) -> Address:
    """Say how a pod's sandbox is reached."""
    ip = pod.status.pod_ip
    host = f"[{ip}]" if ":" in ip else ip
    return Address(ip=ip, envd=f"http://{host}:{names.ENVD_PORT}")


def _state(pod: Pod) -> tuple[InstanceState, str | None]:
    if pod.metadata.deletion_timestamp is not None:
        return InstanceState.FAILED, "its pod is being deleted, and not by us"
    phase = pod.status.phase
    if phase in ("Failed", "Succeeded") and is_replacing(pod) and not pod.status.reason:
        return InstanceState.FAILED, f"its node could not start it anew from image {image(pod)}"
    if phase in ("Failed", "Succeeded"):
        return InstanceState.FAILED, _why_over(pod)
    if (reason := _hopeless(pod)) is not None:
        return InstanceState.FAILED, reason
    if is_replacing(pod):
        return InstanceState.CREATING, f"waits for its node to start image {image(pod)}"
    if phase == "Running" and pod.status.pod_ip and _main_runs(pod):
        if names.ANNOTATION_FROZEN in pod.metadata.annotations:
            return InstanceState.FROZEN, None
        return InstanceState.RUNNING, None
    return InstanceState.CREATING, _what_for(pod)


def _main_runs(pod: Pod) -> bool:
    status = main_status(pod)
    return status is not None and status.state.running is not None


def _has_envd(pod: Pod) -> bool:
    return bool(pod.status.pod_ip) and any(
        status.name == names.ENVD and status.state.running is not None
        for status in pod.status.init_container_statuses
    )


def daemon_trouble(pod: Pod) -> str:
    """Say why the sidecar does not run, as its kubelet puts it; empty where it does."""
    for status in pod.status.init_container_statuses:
        if status.name == names.ENVD and (waiting := status.state.waiting) is not None:
            return f"container {status.name} waits: {_detailed(waiting.reason, waiting.message)}"
    return ""


def _detailed(reason: str, message: str) -> str:
    return f"{reason}: {message}" if message else reason


def _containers(pod: Pod) -> tuple[ContainerStatus, ...]:
    return (*pod.status.container_statuses, *pod.status.init_container_statuses)


def _why_over(pod: Pod) -> str:
    status = pod.status
    if status.reason:
        # Evicted, NodeLost, Shutdown, …: the kubelet speaks about the pod as a whole.
        return f"its pod ended: {status.reason}" + (
            f" ({status.message})" if status.message else ""
        )
    for container in _containers(pod):
        ended = container.state.terminated
        if ended is None or (container.name == names.TOOLS and ended.exit_code == 0):
            continue
        if ended.reason == "OOMKilled":
            return f"container {container.name} ran out of memory and was killed"
        how = f"signal {ended.signal}" if ended.signal else f"exit code {ended.exit_code}"
        detail = ended.message.strip() or ended.reason
        return f"container {container.name} ended with {how}" + (f": {detail}" if detail else "")
    return "its pod ended, and the kubelet gave no reason"


def _hopeless(pod: Pod) -> str | None:
    for container in _containers(pod):
        waiting = container.state.waiting
        if waiting is not None and waiting.reason in _HOPELESS:
            detail = f": {waiting.message}" if waiting.message else ""
            return f"container {container.name} cannot start: {waiting.reason}{detail}"
    return None


def _what_for(pod: Pod) -> str:
    for condition in pod.status.conditions:
        if condition.type == "PodScheduled" and condition.status == "False":
            return f"waits for a node: {condition.message or condition.reason}"
    for container in _containers(pod):
        waiting = container.state.waiting
        if waiting is not None and waiting.reason not in ("", "PodInitializing"):
            return f"container {container.name} waits: {_detailed(waiting.reason, waiting.message)}"
    return "waits for its containers to start"
