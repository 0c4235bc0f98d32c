"""Interpret the status of a pod: the state of its sandbox and the reason. Pure functions."""

from datetime import datetime

from msgspec import Struct

from paddock.resources.kinds.pods import ContainerStatus, Pod
from paddock.resources.meta import Resource
from paddock.runtime.kubernetes import names
from paddock.runtime.port import Address, Instance, InstanceState

_FATAL_WAIT_REASONS = frozenset(
    {
        "CreateContainerConfigError",
        "CreateContainerError",
        "ErrImageNeverPull",
        "ImagePullBackOff",
        "InvalidImageName",
        "RunContainerError",
    }
)
"""Waiting reasons that do not resolve by themselves."""


class PodState(Struct, frozen=True):
    """The state of a sandbox, read from its pod."""

    instance: Instance
    has_envd: bool
    """Whether its envd is reachable."""


def is_owned(obj: Resource, uid: str) -> bool:
    """Whether the object belongs to this sandbox, by its owner reference."""
    return any(ref.uid == uid and ref.controller for ref in obj.metadata.owner_references)


def incarnation(pod: Pod) -> int:
    """Return the incarnation of its sandbox that a pod belongs to."""
    text = pod.metadata.annotations.get(names.ANNOTATION_INCARNATION, "")
    return int(text) if text.isdigit() else 1


def image(pod: Pod) -> str:
    """Return the image of the main container as specified."""
    for container in pod.spec.containers:
        if container.name == names.MAIN:
            return container.image
    return ""


def main_status(pod: Pod) -> ContainerStatus | None:
    """Return the kubelet's status of the main container."""
    for status in pod.status.container_statuses:
        if status.name == names.MAIN:
            return status
    return None


def started_at(pod: Pod) -> datetime | None:
    """Return when the main container started, or else the pod."""
    status = main_status(pod)
    running = status.state.running if status is not None else None
    since = running.started_at if running is not None else None
    return since or pod.status.start_time or pod.metadata.creation_timestamp


def replaced_container(pod: Pod) -> tuple[str, str]:
    """Return the kubelet's id and the sidecar's id of the replaced main container."""
    container, _, main = pod.metadata.annotations.get(names.ANNOTATION_REPLACED, "").partition(" ")
    return container, main


def is_replacing(pod: Pod) -> bool:
    """Whether the kubelet still reports the container that is being replaced."""
    status = main_status(pod)
    former, _ = replaced_container(pod)
    return bool(former) and status is not None and status.container_id == former


def read(pod: Pod, uid: str) -> PodState:
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
    return PodState(instance, has_envd=_has_envd(pod))


def address(pod: Pod) -> Address:
    """Return the addresses of a pod's sandbox."""
    ip = pod.status.pod_ip
    host = f"[{ip}]" if ":" in ip else ip
    return Address(ip=ip, envd=f"http://{host}:{names.ENVD_PORT}")


def _state(pod: Pod) -> tuple[InstanceState, str | None]:
    if pod.metadata.deletion_timestamp is not None:
        return InstanceState.FAILED, "its pod is being deleted, but not by Paddock"
    phase = pod.status.phase
    if phase in ("Failed", "Succeeded") and is_replacing(pod) and not pod.status.reason:
        return InstanceState.FAILED, f"its node could not restart it from image {image(pod)}"
    if phase in ("Failed", "Succeeded"):
        return InstanceState.FAILED, _end_reason(pod)
    if (reason := _fatal_reason(pod)) is not None:
        return InstanceState.FAILED, reason
    if is_replacing(pod):
        return InstanceState.CREATING, f"waits for its node to start image {image(pod)}"
    if phase == "Running" and pod.status.pod_ip and _main_runs(pod):
        if names.ANNOTATION_FROZEN in pod.metadata.annotations:
            return InstanceState.FROZEN, None
        return InstanceState.RUNNING, None
    return InstanceState.CREATING, _pending_reason(pod)


def _main_runs(pod: Pod) -> bool:
    status = main_status(pod)
    return status is not None and status.state.running is not None


def _has_envd(pod: Pod) -> bool:
    return bool(pod.status.pod_ip) and any(
        status.name == names.ENVD and status.state.running is not None
        for status in pod.status.init_container_statuses
    )


def is_envd_killed_for_memory(before: Pod | None, after: Pod) -> bool:
    """Whether the sidecar was restarted since `before`, because its commands used up the memory."""
    if before is None:
        return False
    old, new = _envd_status(before), _envd_status(after)
    if old is None or new is None or new.restart_count <= old.restart_count:
        return False
    ended = new.last_state.terminated
    return ended is not None and ended.reason == "OOMKilled"


def _envd_status(pod: Pod) -> ContainerStatus | None:
    found = (item for item in pod.status.init_container_statuses if item.name == names.ENVD)
    return next(found, None)


def envd_wait_reason(pod: Pod) -> str:
    """Return the kubelet's reason why the sidecar is not running, or an empty string."""
    for status in pod.status.init_container_statuses:
        if status.name == names.ENVD and (waiting := status.state.waiting) is not None:
            return f"container {status.name} waits: {_detailed(waiting.reason, waiting.message)}"
    return ""


def _detailed(reason: str, message: str) -> str:
    return f"{reason}: {message}" if message else reason


def _containers(pod: Pod) -> tuple[ContainerStatus, ...]:
    return (*pod.status.container_statuses, *pod.status.init_container_statuses)


def _end_reason(pod: Pod) -> str:
    status = pod.status
    if status.reason:
        # Evicted, NodeLost, Shutdown, …: a reason for the pod as a whole.
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


def _fatal_reason(pod: Pod) -> str | None:
    for container in _containers(pod):
        waiting = container.state.waiting
        if waiting is not None and waiting.reason in _FATAL_WAIT_REASONS:
            detail = f": {waiting.message}" if waiting.message else ""
            return f"container {container.name} cannot start: {waiting.reason}{detail}"
    return None


def _pending_reason(pod: Pod) -> str:
    for condition in pod.status.conditions:
        if condition.type == "PodScheduled" and condition.status == "False":
            return f"waits for a node: {condition.message or condition.reason}"
    for container in _containers(pod):
        waiting = container.state.waiting
        if waiting is not None and waiting.reason not in ("", "PodInitializing"):
            return f"container {container.name} waits: {_detailed(waiting.reason, waiting.message)}"
    return "waits for its containers to start"
