"""Kinds that the Kubernetes runtime reads and writes: pods, volume claims, network policies.

Each kind has two views. A manifest is written whole and not kept in memory. The other view holds
only the fields that are read, so that ten thousand pods take about ten thousand kilobytes. Embedded
stores do not hold these kinds, so they are not in the registry.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, ClassVar

from msgspec import field

from paddock.resources.frozen import EMPTY, freeze_documents
from paddock.resources.meta import Resource, ResourcePart


class PodManifest(Resource, frozen=True, kw_only=True):
    """A pod as it is created."""

    KIND: ClassVar[str] = "Pod"
    API_VERSION: ClassVar[str] = "v1"
    PLURAL: ClassVar[str] = "pods"

    spec: Mapping[str, Any] = EMPTY

    def __post_init__(self) -> None:
        freeze_documents(self, "spec")


class ContainerStateRunning(ResourcePart, frozen=True, kw_only=True):
    """State of a running container."""

    started_at: datetime | None = None


class ContainerStateWaiting(ResourcePart, frozen=True, kw_only=True):
    """State of a container that does not run yet."""

    reason: str = ""
    message: str = ""


class ContainerStateTerminated(ResourcePart, frozen=True, kw_only=True):
    """State of a container that has terminated."""

    exit_code: int = 0
    signal: int = 0
    reason: str = ""
    message: str = ""


class ContainerState(ResourcePart, frozen=True, kw_only=True):
    """At most one of the three is set."""

    running: ContainerStateRunning | None = None
    waiting: ContainerStateWaiting | None = None
    terminated: ContainerStateTerminated | None = None


class ContainerStatus(ResourcePart, frozen=True, kw_only=True):
    """Status of one container, as the kubelet reports it."""

    name: str = ""
    ready: bool = False
    restart_count: int = 0
    container_id: str = field(name="containerID", default="")
    """Changes with every restart. Empty before the first start."""
    state: ContainerState = ContainerState()
    last_state: ContainerState = ContainerState()
    """How the previous run ended, if it was restarted."""


class PodCondition(ResourcePart, frozen=True, kw_only=True):
    """Condition of a pod."""

    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""


class PodStatus(ResourcePart, frozen=True, kw_only=True):
    """Status of a pod, as the kubelet reports it."""

    phase: str = "Pending"
    reason: str = ""
    message: str = ""
    host_ip: str = field(name="hostIP", default="")
    pod_ip: str = field(name="podIP", default="")
    start_time: datetime | None = None
    conditions: tuple[PodCondition, ...] = ()
    init_container_statuses: tuple[ContainerStatus, ...] = ()
    container_statuses: tuple[ContainerStatus, ...] = ()


class PodContainer(ResourcePart, frozen=True, kw_only=True):
    """Specification of a container."""

    name: str = ""
    image: str = ""


class PodPlacement(ResourcePart, frozen=True, kw_only=True):
    """The part of a pod's spec that Paddock reads."""

    node_name: str = ""
    containers: tuple[PodContainer, ...] = ()


class Pod(Resource, frozen=True, kw_only=True):
    """A pod as it is read."""

    KIND: ClassVar[str] = "Pod"
    API_VERSION: ClassVar[str] = "v1"
    PLURAL: ClassVar[str] = "pods"

    spec: PodPlacement = PodPlacement()
    status: PodStatus = PodStatus()


class VolumeClaimManifest(Resource, frozen=True, kw_only=True):
    """A PersistentVolumeClaim as it is created."""

    KIND: ClassVar[str] = "PersistentVolumeClaim"
    API_VERSION: ClassVar[str] = "v1"
    PLURAL: ClassVar[str] = "persistentvolumeclaims"

    spec: Mapping[str, Any] = EMPTY

    def __post_init__(self) -> None:
        freeze_documents(self, "spec")


class VolumeClaim(Resource, frozen=True, kw_only=True):
    """A PersistentVolumeClaim as it is read: only its metadata."""

    KIND: ClassVar[str] = "PersistentVolumeClaim"
    API_VERSION: ClassVar[str] = "v1"
    PLURAL: ClassVar[str] = "persistentvolumeclaims"


class NetworkPolicyManifest(Resource, frozen=True, kw_only=True):
    """A NetworkPolicy as it is created."""

    KIND: ClassVar[str] = "NetworkPolicy"
    API_VERSION: ClassVar[str] = "networking.k8s.io/v1"
    PLURAL: ClassVar[str] = "networkpolicies"

    spec: Mapping[str, Any] = EMPTY

    def __post_init__(self) -> None:
        freeze_documents(self, "spec")
