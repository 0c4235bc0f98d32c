"""Encoding of request bodies.

Paddock's own kinds and Leases are fully modelled and written with PUT; a status write contains only
the status. The structs of other built-in kinds have only some of the fields, so their updates are
merge patches that keep the others.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any, cast

import msgspec
from msgspec import structs

from paddock.resources.kinds.builtin import Lease
from paddock.resources.meta import ObjectMeta, Resource
from paddock.store import semantics

_encoder = msgspec.json.Encoder()
_NO_FIELD_OWNERS: dict[str, Any] = {"managedFields": [{}]}
"""Makes the server drop `managedFields`; an empty list would keep them."""
_ENVELOPE = ("api_version", "kind", "metadata", "status")


@cache
def _own_fields(kind: type[Resource]) -> tuple[tuple[str, str], ...]:
    """Return attribute and JSON names of the fields other than envelope and status."""
    return tuple(
        (field.name, field.encode_name)
        for field in structs.fields(kind)
        if field.name not in _ENVELOPE
    )


def _body(obj: Resource, metadata: ObjectMeta) -> dict[str, Any]:
    body: dict[str, Any] = {
        "apiVersion": obj.API_VERSION,
        "kind": obj.KIND,
        "metadata": metadata,
    }
    for attribute, name in _own_fields(type(obj)):
        body[name] = _spec(obj) if attribute == "spec" else getattr(obj, attribute)
    return body


def _spec(obj: Resource) -> Any:
    """Return the spec; times of a Lease always have six decimals, as its schema requires."""
    spec: Any = getattr(obj, "spec")  # noqa: B009 - the base class does not declare it
    if not isinstance(obj, Lease):
        return spec
    plain: dict[str, Any] = msgspec.to_builtins(spec)
    for attribute, name in (("acquire_time", "acquireTime"), ("renew_time", "renewTime")):
        if (moment := getattr(spec, attribute)) is not None:
            plain[name] = moment.isoformat(timespec="microseconds").replace("+00:00", "Z")
    return plain


def _writable(metadata: ObjectMeta) -> ObjectMeta:
    """Drop the fields that the server sets; uid and version are kept as preconditions."""
    return structs.replace(
        metadata,
        generation=0,
        creation_timestamp=None,
        deletion_timestamp=None,
        deletion_grace_period_seconds=None,
    )


def create_body(obj: Resource) -> bytes:
    """Return the body of a new object, without status, which is a subresource."""
    metadata = structs.replace(
        _writable(obj.metadata),
        generate_name="" if obj.metadata.name else obj.metadata.generate_name,
        uid="",
        resource_version="",
    )
    return _encoder.encode(_body(obj, metadata))


def update_body(obj: Resource) -> bytes:
    """Return the body with metadata and spec of a fully modelled object.

    Objects with a generated name are not applied by users, so their field owners do not matter.
    For these the server drops `managedFields`, which is half of the object and of the work.
    """
    body = _body(obj, _writable(obj.metadata))
    if obj.metadata.generate_name:
        body["metadata"] = msgspec.to_builtins(body["metadata"]) | _NO_FIELD_OWNERS
    return _encoder.encode(body)


def status_body(obj: Resource) -> bytes:
    """Return the body of a status update; the server keeps all other fields."""
    identity = ObjectMeta(
        name=obj.metadata.name,
        namespace=obj.metadata.namespace,
        uid=obj.metadata.uid,
        resource_version=obj.metadata.resource_version,
    )
    body: dict[str, Any] = {
        "apiVersion": obj.API_VERSION,
        "kind": obj.KIND,
        "metadata": identity,
    }
    status: Any = getattr(obj, "status")  # noqa: B009
    # To a server, an empty status differs from no status, which new objects have.
    if status != semantics.empty_status(type(obj)):
        body["status"] = status
    return _encoder.encode(body)


def change_patch(current: Resource, new: Resource, *, status: bool) -> bytes | None:
    """Return the merge patch between two states of an object; `None` if they are equal."""
    plain = _plain_status if status else _plain_content
    patch = merge_patch(plain(current), plain(new))
    if not patch:
        return None
    metadata = {"resourceVersion": current.metadata.resource_version, "uid": current.metadata.uid}
    patch["metadata"] = patch.get("metadata", {}) | metadata
    return _encoder.encode(patch)


def merge_patch(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON merge patch (RFC 7386) from `old` to `new`."""
    patch: dict[str, Any] = {name: None for name in old if name not in new}
    for name, value in new.items():
        before = old.get(name)
        if isinstance(value, dict) and isinstance(before, dict):
            inner = merge_patch(cast("dict[str, Any]", before), cast("dict[str, Any]", value))
            if inner:
                patch[name] = inner
        elif name not in old or value != before:
            patch[name] = value
    return patch


def _plain_content(obj: Resource) -> dict[str, Any]:
    metadata = ObjectMeta(
        labels=obj.metadata.labels,
        annotations=obj.metadata.annotations,
        finalizers=obj.metadata.finalizers,
        owner_references=obj.metadata.owner_references,
    )
    plain = msgspec.to_builtins(_body(obj, metadata))
    del plain["apiVersion"], plain["kind"]
    return plain


def _plain_status(obj: Resource) -> dict[str, Any]:
    return {"status": msgspec.to_builtins(getattr(obj, "status"))}  # noqa: B009


def delete_body(
    propagation: str, uid: str | None, resource_version: str | None, *, dry_run: bool
) -> bytes:
    """Return the `DeleteOptions` of a deletion."""
    options: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "DeleteOptions",
        "propagationPolicy": propagation,
    }
    preconditions = {"uid": uid, "resourceVersion": resource_version}
    if given := {name: value for name, value in preconditions.items() if value is not None}:
        options["preconditions"] = given
    if dry_run:
        options["dryRun"] = ["All"]
    return _encoder.encode(options)
