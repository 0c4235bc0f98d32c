"""The rules of Kubernetes for a write of one object, as pure functions.

Each function takes the stored object and the request, and returns the object to store, still with
the version that was read. Versions and multiple objects are in `transaction`, dependents in
`garbage`, limits of fields in `paddock.resources.schema.validation`.
"""

from datetime import datetime
from functools import cache
from typing import Any

from msgspec import NODEFAULT, Struct, structs

from paddock.kit.errors import (
    ConflictError,
    FieldProblem,
    InvalidError,
    NotFoundError,
    TooLargeError,
)
from paddock.resources import codec
from paddock.resources.meta import Key, ObjectMeta, R, Resource
from paddock.resources.schema import validation

MAX_OBJECT_BYTES = 1_500_000
"""About the limit of etcd, so that every stored object could also be stored on a cluster."""
MAX_GENERATED_BASE = 58
"""Characters of `generateName` that are used; five random ones are appended."""
FOREGROUND_FINALIZER = "foregroundDeletion"
ORPHAN_FINALIZER = "orphan"
NAMESPACE_FINALIZER = "kubernetes"
"""Holds a namespace until all objects in it are gone."""
_NOT_CONTENT = frozenset({"api_version", "kind", "metadata", "status"})


def canonical(obj: R) -> R:
    """Encode and decode an object.

    The result equals what a restart loads, and its values have the types that the kind declares.
    """
    return codec.decode(type(obj), _encoded(obj))


def _encoded(obj: Resource) -> bytes:
    try:
        data = codec.encode(obj)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidError(f"{obj.KIND} {obj.key} cannot be written as JSON: {error}") from error
    if len(data) > MAX_OBJECT_BYTES:
        raise TooLargeError(
            f"{obj.KIND} {obj.key} is {len(data)} bytes; the limit is {MAX_OBJECT_BYTES}",
            hint="store large data in files or volumes and reference it",
        )
    return data


def prepare_create(obj: R, *, uid: str, now: datetime, with_status: bool) -> R:
    """Return a new object with its identity; `named` sets its name beforehand."""
    check_scope(obj)
    meta = obj.metadata
    obj = structs.replace(
        obj,
        metadata=ObjectMeta(
            name=meta.name,
            generate_name=meta.generate_name,
            namespace=meta.namespace,
            uid=uid,
            generation=1,
            creation_timestamp=now.replace(microsecond=0),
            labels=meta.labels,
            annotations=meta.annotations,
            finalizers=meta.finalizers,
            owner_references=meta.owner_references,
        ),
    )
    if has_status(type(obj)) and not with_status:
        obj = structs.replace(obj, status=empty_status(type(obj)))  # pyright: ignore[reportCallIssue]
    new = canonical(obj)
    validation.validate_create(new)
    return new


def named(obj: R, suffix: str) -> R:
    """Return the object with a name from `generateName` if it has none."""
    meta = obj.metadata
    if meta.name or not meta.generate_name:
        return obj
    name = meta.generate_name[:MAX_GENERATED_BASE] + suffix
    return structs.replace(obj, metadata=structs.replace(meta, name=name))


def prepare_update(current: R | None, obj: R) -> R:
    """Return the stored object with metadata and content from the writer.

    Returns `current` itself if nothing changes.
    """
    current = check_version(current, obj)
    stored: dict[str, Any] = {"metadata": _merged(current.metadata, obj.metadata)}
    if has_status(type(obj)):
        stored["status"] = getattr(current, "status")  # noqa: B009
    new = codec.typed(structs.replace(obj, **stored))
    if new == current:
        return current
    new = canonical(new)
    changes = _changed_content(current, new)
    if not changes and new == current:
        return current
    new = _share(current, new, changes)
    validation.validate_update(current, new)
    return new


def prepare_status(current: R | None, obj: R) -> R:
    """Return the stored object with the status from the writer.

    Returns `current` itself if nothing changes.
    """
    if not has_status(type(obj)):
        raise NotFoundError(f"{obj.KIND} has no status subresource")
    current = check_version(current, obj)
    new: R = structs.replace(current, status=getattr(obj, "status"))  # noqa: B009  # pyright: ignore[reportCallIssue]
    if new == current:
        return current
    status = codec.decode_status(type(obj), _encoded(new))
    new = structs.replace(current, status=status)  # pyright: ignore[reportCallIssue]
    return current if new == current else new


def check_version(current: R | None, obj: R) -> R:
    """Raise unless the write names the uid and the version that are stored."""
    check_names_version(obj)
    meta = obj.metadata
    current = found(type(obj), obj.key, current)
    check_preconditions(current, uid=meta.uid, resource_version=meta.resource_version)
    return current


def check_names_version(obj: Resource) -> None:
    """Raise if the write names no version."""
    if not obj.metadata.resource_version:
        problem = FieldProblem(
            "metadata.resourceVersion", "is required: set it to the version that was read"
        )
        raise InvalidError(f"{obj.KIND} {obj.key}: {problem}", problems=[problem])


def found(cls: type[R], key: Key, current: R | None) -> R:
    """Return the object; `NotFoundError` if it does not exist."""
    if current is None:
        raise NotFoundError(f"there is no {cls.KIND} {key}")
    return current


def check_preconditions(
    current: Resource, *, uid: str | None = None, resource_version: str | None = None
) -> None:
    """Raise `ConflictError` if uid or version differ from the stored object."""
    meta = current.metadata
    if uid and uid != meta.uid:
        raise ConflictError(
            f"{current.KIND} {current.key} has uid {meta.uid}, not {uid}: it was recreated",
            hint="read it again",
        )
    if resource_version and resource_version != meta.resource_version:
        raise ConflictError(
            f"{current.KIND} {current.key} is at version {meta.resource_version}, "
            f"not {resource_version}: it was written since it was read",
            hint="read it again and repeat the change",
        )


def marked_for_deletion(current: R, *, finalizers: tuple[str, ...], now: datetime) -> R:
    """Return the object with a deletion timestamp and these finalizers."""
    meta = current.metadata
    if meta.deletion_timestamp is not None and meta.finalizers == finalizers:
        return current
    return structs.replace(
        current,
        metadata=structs.replace(
            meta,
            finalizers=finalizers,
            deletion_timestamp=meta.deletion_timestamp or now.replace(microsecond=0),
            deletion_grace_period_seconds=meta.deletion_grace_period_seconds or 0,
        ),
    )


def stamped(obj: R, version: int) -> R:
    """Return the object with this version."""
    return structs.replace(
        obj, metadata=structs.replace(obj.metadata, resource_version=str(version))
    )


@cache
def has_status(cls: type[Resource]) -> bool:
    """Whether a kind has a status subresource."""
    return "status" in cls.__struct_fields__


@cache
def empty_status(cls: type[Resource]) -> Any:
    """Return the status of a new object."""
    field = next(field for field in structs.fields(cls) if field.name == "status")
    return field.default if field.default is not NODEFAULT else field.default_factory()


@cache
def content_fields(cls: type[Resource]) -> tuple[str, ...]:
    """Return the fields other than metadata and status: usually `spec`."""
    return tuple(name for name in cls.__struct_fields__ if name not in _NOT_CONTENT)


def _changed_content(current: Resource, new: Resource) -> list[str]:
    return [
        name for name in content_fields(type(new)) if getattr(current, name) != getattr(new, name)
    ]


def _merged(current: ObjectMeta, requested: ObjectMeta) -> ObjectMeta:
    return structs.replace(
        current,
        labels=requested.labels,
        annotations=requested.annotations,
        finalizers=requested.finalizers,
        owner_references=requested.owner_references,
    )


def _share(current: R, new: R, changes: list[str]) -> R:
    """Reuse unchanged parts of the stored object, and increase the generation on a change.

    Unchanged parts are then in memory once, also in the history.
    """
    same: dict[str, Any] = {
        name: _shared_part(getattr(current, name), getattr(new, name))
        if name in changes
        else getattr(current, name)
        for name in content_fields(type(new))
    }
    if has_status(type(new)):
        same["status"] = getattr(current, "status")  # noqa: B009
    meta, old = new.metadata, current.metadata
    same_meta: dict[str, Any] = {
        name: getattr(old, name)
        for name in ("name", "namespace", "uid", "labels", "annotations", "finalizers")
        if getattr(old, name) == getattr(meta, name)
    }
    if old.owner_references == meta.owner_references:
        same_meta["owner_references"] = old.owner_references
    if changes:
        same_meta["generation"] = old.generation + 1
    return structs.replace(new, metadata=structs.replace(meta, **same_meta), **same)


def _shared_part(old: Any, new: Any) -> Any:
    """Reuse the unchanged fields of a changed part."""
    if type(old) is not type(new) or not isinstance(new, Struct):
        return new
    fields = ((name, getattr(old, name)) for name in new.__struct_fields__)
    same = {name: value for name, value in fields if value == getattr(new, name)}
    return structs.replace(new, **same)


def check_scope(obj: Resource) -> None:
    """Raise if a namespaced object has no namespace, or a cluster-scoped one has one."""
    namespace = obj.metadata.namespace
    if obj.NAMESPACED and not namespace:
        problem = FieldProblem("metadata.namespace", f"is required: {obj.KIND} is namespaced")
    elif not obj.NAMESPACED and namespace:
        problem = FieldProblem("metadata.namespace", f"must be empty: {obj.KIND} is cluster-scoped")
    else:
        return
    raise InvalidError(f"{obj.KIND} {obj.key}: {problem}", problems=[problem])
