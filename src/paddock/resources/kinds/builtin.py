"""Built-in Kubernetes kinds that Paddock stores too: Namespace, Event, Lease, Secret.

On a cluster, the API server keeps them. The embedded store keeps them with the same semantics.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import ClassVar

from paddock.resources.frozen import EMPTY, freeze_fields
from paddock.resources.meta import Resource, ResourcePart


class NamespaceStatus(ResourcePart, frozen=True, kw_only=True):
    """Observed state of a namespace."""

    phase: str = "Active"


class Namespace(Resource, frozen=True, kw_only=True):
    """Scope of object names. Each team has one."""

    KIND: ClassVar[str] = "Namespace"
    API_VERSION: ClassVar[str] = "v1"
    PLURAL: ClassVar[str] = "namespaces"
    NAMESPACED: ClassVar[bool] = False

    status: NamespaceStatus = NamespaceStatus()


class ObjectReference(ResourcePart, frozen=True, kw_only=True):
    """Reference to an object of any kind."""

    api_version: str = ""
    kind: str = ""
    namespace: str = ""
    name: str = ""
    uid: str = ""
    resource_version: str = ""


class EventSource(ResourcePart, frozen=True, kw_only=True):
    """The component that reports an event."""

    component: str = ""


class Event(Resource, frozen=True, kw_only=True):
    """A report of something that happened to an object."""

    KIND: ClassVar[str] = "Event"
    API_VERSION: ClassVar[str] = "v1"
    PLURAL: ClassVar[str] = "events"

    involved_object: ObjectReference = ObjectReference()
    reason: str = ""
    message: str = ""
    type: str = "Normal"
    count: int = 1
    first_timestamp: datetime | None = None
    last_timestamp: datetime | None = None
    source: EventSource = EventSource()
    reporting_component: str = ""
    reporting_instance: str = ""


class LeaseSpec(ResourcePart, frozen=True, kw_only=True):
    """Holder and duration of a lease."""

    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    acquire_time: datetime | None = None
    renew_time: datetime | None = None
    lease_transitions: int | None = None


class Lease(Resource, frozen=True, kw_only=True):
    """A lock that expires unless it is renewed."""

    KIND: ClassVar[str] = "Lease"
    API_VERSION: ClassVar[str] = "coordination.k8s.io/v1"
    PLURAL: ClassVar[str] = "leases"

    spec: LeaseSpec = LeaseSpec()


class Secret(Resource, frozen=True, kw_only=True):
    """Small secrets, such as hashed API keys. Values are base64, as in Kubernetes."""

    KIND: ClassVar[str] = "Secret"
    API_VERSION: ClassVar[str] = "v1"
    PLURAL: ClassVar[str] = "secrets"

    type: str = "Opaque"
    data: Mapping[str, str] = EMPTY

    def __post_init__(self) -> None:
        freeze_fields(self, "data")
