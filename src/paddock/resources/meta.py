"""The common part of every resource: metadata with Kubernetes' semantics, conditions, references.

Structs are immutable in every part (see `frozen`): readers may keep and share them. Change one
with `msgspec.structs.replace`. Unknown fields are ignored here (rollbacks, newer writers);
`codec.from_builtins` can refuse them in documents that users apply.
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


class Key(NamedTuple):
    """Namespace (empty for cluster-wide kinds) and name of an object."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}" if self.namespace else self.name


class ResourcePart(
    Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True, gc=False, dict=False
):
    """Base of everything inside a resource."""


class OwnerReference(ResourcePart, frozen=True, kw_only=True):
    """Who an object belongs to; it goes when its owners are gone."""

    api_version: str
    """Of the owner."""
    kind: str
    """Of the owner."""
    name: str
    """Of the owner."""
    uid: str
    """Of the owner."""
    controller: bool = False
    """Whether this owner manages the object."""
    block_owner_deletion: bool = False
    """Whether the owner, deleted in the foreground, waits for this object."""


class ObjectMeta(ResourcePart, frozen=True, kw_only=True):
    """Identity and bookkeeping of an object, as Kubernetes keeps it."""

    name: str = ""
    """Unique among objects of its kind in its namespace."""
    generate_name: str = ""
    """With an empty name: the server appends a random tail to this."""
    namespace: str = ""
    """Where it is."""
    uid: str = ""
    """Tells it from any other object of that name, ever."""
    resource_version: str = ""
    """Opaque; grows with every write to the store. Writing names the version that was read."""
    generation: int = 0
    """Grows when the spec changes, and only then."""
    creation_timestamp: datetime | None = None
    """When it was made."""
    deletion_timestamp: datetime | None = None
    """Since when it is being deleted."""
    deletion_grace_period_seconds: int | None = None
    """Not used."""
    labels: Mapping[str, str] = EMPTY
    """By which it is selected."""
    annotations: Mapping[str, str] = EMPTY
    """Anything that is not selected by."""
    finalizers: tuple[str, ...] = ()
    """Who has yet to agree to its end."""
    owner_references: tuple[OwnerReference, ...] = ()
    """Whose it is; it goes when they are all gone."""

    def __post_init__(self) -> None:
        # Written out: this runs for every object that is read or written.
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
    """One observed fact about an object, with since when and why."""

    type: str
    """What is claimed."""
    status: ConditionStatus
    """Whether it holds."""
    reason: str
    """One word: why."""
    message: str = ""
    """One sentence for people."""
    last_transition_time: datetime | None = None
    """Since when."""
    observed_generation: int = 0
    """The generation that it is about."""


class Resource(
    Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=False, gc=False, dict=False
):
    """Base of every kind. Subclasses add `spec` and `status`; builtins their own fields."""

    KIND: ClassVar[str] = ""
    API_VERSION: ClassVar[str] = API_VERSION
    PLURAL: ClassVar[str] = ""
    NAMESPACED: ClassVar[bool] = True

    api_version: str = ""
    kind: str = ""
    metadata: ObjectMeta = ObjectMeta()

    @property
    def key(self) -> Key:
        """Where this object is."""
        return Key(self.metadata.namespace, self.metadata.name)

    @property
    def is_deleting(self) -> bool:
        """Whether deletion has begun; finalizers may still hold it."""
        return self.metadata.deletion_timestamp is not None


R = TypeVar("R", bound=Resource)


def with_meta(obj: R, **changes: Any) -> R:
    """Return the object with some metadata fields replaced."""
    return structs.replace(obj, metadata=structs.replace(obj.metadata, **changes))


def owner_reference(owner: Resource, *, controller: bool = True) -> OwnerReference:
    """Return the reference with which a child names this owner."""
    return OwnerReference(
        api_version=owner.API_VERSION,
        kind=owner.KIND,
        name=owner.metadata.name,
        uid=owner.metadata.uid,
        controller=controller,
        block_owner_deletion=controller,
    )


def controller_of(obj: Resource) -> OwnerReference | None:
    """Return the owner that controls the object, or `None`."""
    return next((ref for ref in obj.metadata.owner_references if ref.controller), None)


def condition(conditions: tuple[Condition, ...], kind: str) -> Condition | None:
    """Return a condition by type, or `None`."""
    return next((item for item in conditions if item.type == kind), None)


def is_true(conditions: tuple[Condition, ...], kind: str) -> bool:
    """Whether a condition is present and true."""
    found = condition(conditions, kind)
    return found is not None and found.status is ConditionStatus.TRUE


def set_condition(
    conditions: tuple[Condition, ...], new: Condition, *, now: datetime
) -> tuple[Condition, ...]:
    """Add or replace a condition; the transition time moves only when the status does."""
    old = condition(conditions, new.type)
    since = now
    if old is not None and old.status is new.status and old.last_transition_time is not None:
        since = old.last_transition_time
    stamped = structs.replace(new, last_transition_time=since)
    if old is None:
        return (*conditions, stamped)
    return tuple(stamped if item.type == new.type else item for item in conditions)
