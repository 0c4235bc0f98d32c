"""What the Kubernetes driver reads and writes of a cluster's own kinds.

Two views of one kind: a manifest is written whole and never kept, a sliver is what is kept of what
was read. Ten thousand pods are kept as slivers in about as many kilobytes. Embedded stores have
none of these, so they are not in the registry.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, ClassVar

from msgspec import field

from paddock.resources.frozen import EMPTY, freeze_documents
from paddock.resources.meta import Resource, ResourcePart


class PodManifest(Resource, frozen=True, kw_only=True):
    """A pod as it is made."""

    KIND: ClassVar[str] = "Pod"
    API_VERSION: ClassVar[str] = "v1"
    PLURAL: ClassVar[str] = "pods"

    spec: Mapping[str, Any] = EMPTY

    def __post_init__(self) -> None:
        freeze_documents(self, "spec")


class ContainerStateRunning(ResourcePart, frozen=True, kw_only=True):
    """A container runs."""

    started_at: datetime | None = None


class ContainerStateWaiting(ResourcePart, frozen=True, kw_only=True):
    """A container does not run yet."""

    reason: str = ""
    message: str = ""


class ContainerStateTerminated(ResourcePart, frozen=True, kw_only=True):
    """A container has ended."""

    exit_code: int = 0
    signal: int = 0
    reason: str = ""
    message: str = ""


class ContainerState(ResourcePart, frozen=True, kw_only=True):
    """One of the three, or none yet."""

    running: ContainerStateRunning | None = None
    waiting: ContainerStateWaiting | None = None
    terminated: ContainerStateTerminated | None = None


class ContainerStatus(ResourcePart, frozen=True, kw_only=True):
    """What a kubelet says of one container."""

    name: str = ""
    ready: bool = False
    restart_count: int = 0
    container_id: str = field(name="containerID", default="")
    """Another one after every restart; empty while there is none."""
    state: ContainerState = ContainerState()


class PodCondition(ResourcePart, frozen=True, kw_only=True):
    """What holds for a pod."""

    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""


class PodStatus(ResourcePart, frozen=True, kw_only=True):
    """What a kubelet says of a pod."""

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
    """A container as it is wanted."""

    name: str = ""
    image: str = ""


class PodPlacement(ResourcePart, frozen=True, kw_only=True):
    """The part of a pod's spec that is looked at."""

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
    """A PersistentVolumeClaim as it is made."""

    KIND: ClassVar[str] = "PersistentVolumeClaim"
    API_VERSION: ClassVar[str] = "v1"
    PLURAL: ClassVar[str] = "persistentvolumeclaims"

    spec: Mapping[str, Any] = EMPTY

    def __post_init__(self) -> None:
        freeze_documents(self, "spec")


class VolumeClaim(Resource, frozen=True, kw_only=True):
    """A PersistentVolumeClaim as it is read: that it is there, and what it is marked with."""

    KIND: ClassVar[str] = "PersistentVolumeClaim"
    API_VERSION: ClassVar[str] = "v1"
    PLURAL: ClassVar[str] = "persistentvolumeclaims"


class NetworkPolicyManifest(Resource, frozen=True, kw_only=True):
    """A NetworkPolicy as it is made."""

    KIND: ClassVar[str] = "NetworkPolicy"
    API_VERSION: ClassVar[str] = "networking.k8s.io/v1"
    PLURAL: ClassVar[str] = "networkpolicies"

    spec: Mapping[str, Any] = EMPTY

    def __post_init__(self) -> None:
        freeze_documents(self, "spec")
