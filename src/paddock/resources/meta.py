"""Common parts of every resource: metadata with Kubernetes semantics, conditions, references.

Structs are immutable in every part (see `frozen`): readers may keep and share them. Change one with
`msgspec.structs.replace`. Unknown fields are ignored here, for rollbacks and newer writers.
`codec.from_builtins` can reject them in documents that users apply.
"""

from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import Any, ClassVar, NamedTuple, TypeVar

from msgspec import Struct, structs

from paddock.resources.frozen import EMPTY, FrozenDict, freeze_flat

GROUP = "paddock.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
ANNOTATION_KEY = f"{GROUP}/key-id"
"""The API key that created an object by the declarative API. The server sets it, and what comes of
the object counts against the quota of this key."""


class Key(NamedTuple):
    """Namespace (empty for cluster-scoped kinds) and name of an object."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}" if self.namespace else self.name


class ResourcePart(
    Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True, gc=False, dict=False
):
    """Base class of every struct inside a resource."""


class OwnerReference(ResourcePart, frozen=True, kw_only=True):
    """Reference to the owner of an object. The object is deleted when all its owners are gone."""

    api_version: str
    """API version of the owner."""
    kind: str
    """Kind of the owner."""
    name: str
    """Name of the owner."""
    uid: str
    """UID of the owner."""
    controller: bool = False
    """Whether this owner is the managing controller."""
    block_owner_deletion: bool = False
    """Whether a foreground deletion of the owner waits for this object."""


class ObjectMeta(ResourcePart, frozen=True, kw_only=True):
    """Metadata of an object, as in Kubernetes."""

    name: str = ""
    """Name of the object. Unique among objects of its kind in its namespace."""
    generate_name: str = ""
    """Prefix of a generated name, used if `name` is empty. The server appends a random suffix."""
    namespace: str = ""
    """Namespace of the object."""
    uid: str = ""
    """Unique id of the object. Never reused by another object of the same name."""
    resource_version: str = ""
    """Opaque version of the object. It changes with every write. An update must carry the version
    that was read."""
    generation: int = 0
    """Counter of changes of the spec."""
    creation_timestamp: datetime | None = None
    """Time at which the object was created."""
    deletion_timestamp: datetime | None = None
    """Time at which deletion was requested."""
    deletion_grace_period_seconds: int | None = None
    """Not used."""
    labels: Mapping[str, str] = EMPTY
    """Labels, used by selectors."""
    annotations: Mapping[str, str] = EMPTY
    """Annotations. Selectors cannot use them."""
    finalizers: tuple[str, ...] = ()
    """Finalizers that must be removed before the object is deleted."""
    owner_references: tuple[OwnerReference, ...] = ()
    """Owners of the object. It is deleted when all of them are gone."""

    def __post_init__(self) -> None:
        # Not `freeze_fields`, for speed: this runs for every object that is read or written.
        if type(self.labels) is not FrozenDict:
            structs.force_setattr(self, "labels", freeze_flat(self.labels))
        if type(self.annotations) is not FrozenDict:
            structs.force_setattr(self, "annotations", freeze_flat(self.annotations))


class ConditionStatus(StrEnum):
    """Whether a condition holds."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(ResourcePart, frozen=True, kw_only=True):
    """An observed aspect of the state of an object."""

    type: str
    """Type of the condition."""
    status: ConditionStatus
    """Status of the condition: True, False or Unknown."""
    reason: str
    """Reason for the last transition, in CamelCase."""
    message: str = ""
    """Human-readable details about the last transition."""
    last_transition_time: datetime | None = None
    """Time at which the status last changed."""
    observed_generation: int = 0
    """The generation that this condition reflects."""


class Resource(
    Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=False, gc=False, dict=False
):
    """Base class of every kind. Subclasses add `spec` and `status`, or their own fields."""

    KIND: ClassVar[str] = ""
    API_VERSION: ClassVar[str] = API_VERSION
    PLURAL: ClassVar[str] = ""
    NAMESPACED: ClassVar[bool] = True

    api_version: str = ""
    kind: str = ""
    metadata: ObjectMeta = ObjectMeta()

    @property
    def key(self) -> Key:
        """Namespace and name of this object."""
        return Key(self.metadata.namespace, self.metadata.name)

    @property
    def is_deleting(self) -> bool:
        """Whether deletion was requested. Finalizers may still delay it."""
        return self.metadata.deletion_timestamp is not None


R = TypeVar("R", bound=Resource)


def with_meta(obj: R, **changes: Any) -> R:
    """Return the object with some metadata fields replaced."""
    return structs.replace(obj, metadata=structs.replace(obj.metadata, **changes))


def key_of(obj: Resource) -> str:
    """Return the id of the API key that created an object, or an empty string."""
    return obj.metadata.annotations.get(ANNOTATION_KEY, "")


def owner_reference(owner: Resource, *, controller: bool = True) -> OwnerReference:
    """Return a reference to this owner."""
    return OwnerReference(
        api_version=owner.API_VERSION,
        kind=owner.KIND,
        name=owner.metadata.name,
        uid=owner.metadata.uid,
        controller=controller,
        block_owner_deletion=controller,
    )


def controller_of(obj: Resource) -> OwnerReference | None:
    """Return the reference to the controlling owner, or `None`."""
    return next((ref for ref in obj.metadata.owner_references if ref.controller), None)


def condition(conditions: tuple[Condition, ...], kind: str) -> Condition | None:
    """Return the condition of this type, or `None`."""
    return next((item for item in conditions if item.type == kind), None)


def is_true(conditions: tuple[Condition, ...], kind: str) -> bool:
    """Whether a condition is present and true."""
    found = condition(conditions, kind)
    return found is not None and found.status is ConditionStatus.TRUE


def set_condition(
    conditions: tuple[Condition, ...], new: Condition, *, now: datetime
) -> tuple[Condition, ...]:
    """Add or replace a condition. The transition time changes only with the status."""
    old = condition(conditions, new.type)
    since = now
    if old is not None and old.status is new.status and old.last_transition_time is not None:
        since = old.last_transition_time
    stamped = structs.replace(new, last_transition_time=since)
    if old is None:
        return (*conditions, stamped)
    return tuple(stamped if item.type == new.type else item for item in conditions)
