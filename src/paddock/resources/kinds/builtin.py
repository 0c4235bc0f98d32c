"""Kubernetes' own kinds that Paddock stores too: Namespace, Event, Lease, Secret.

On a cluster they are the cluster's; the embedded store keeps them with the same meaning.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import ClassVar

from paddock.resources.frozen import EMPTY, freeze_fields
from paddock.resources.meta import Resource, ResourcePart


class NamespaceStatus(ResourcePart, frozen=True, kw_only=True):
    """Where a namespace is in its life."""

    phase: str = "Active"


class Namespace(Resource, frozen=True, kw_only=True):
    """A place for names; a team's."""

    KIND: ClassVar[str] = "Namespace"
    API_VERSION: ClassVar[str] = "v1"
    PLURAL: ClassVar[str] = "namespaces"
    NAMESPACED: ClassVar[bool] = False

    status: NamespaceStatus = NamespaceStatus()


class ObjectReference(ResourcePart, frozen=True, kw_only=True):
    """Names any object."""

    api_version: str = ""
    kind: str = ""
    namespace: str = ""
    name: str = ""
    uid: str = ""
    resource_version: str = ""


class EventSource(ResourcePart, frozen=True, kw_only=True):
    """Who reports."""

    component: str = ""


class Event(Resource, frozen=True, kw_only=True):
    """Something that happened to an object, for people to read."""

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
    """Who holds a lease and until when."""

    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    acquire_time: datetime | None = None
    renew_time: datetime | None = None
    lease_transitions: int | None = None


class Lease(Resource, frozen=True, kw_only=True):
    """A lock with an end."""

    KIND: ClassVar[str] = "Lease"
    API_VERSION: ClassVar[str] = "coordination.k8s.io/v1"
    PLURAL: ClassVar[str] = "leases"

    spec: LeaseSpec = LeaseSpec()


class Secret(Resource, frozen=True, kw_only=True):
    """Small secrets, such as hashed API keys; values are base64 as Kubernetes has them."""

    KIND: ClassVar[str] = "Secret"
    API_VERSION: ClassVar[str] = "v1"
    PLURAL: ClassVar[str] = "secrets"

    type: str = "Opaque"
    data: Mapping[str, str] = EMPTY

    def __post_init__(self) -> None:
        freeze_fields(self, "data")
