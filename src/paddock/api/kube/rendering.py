"""Objects and lists in the form that Kubernetes clients expect."""

from typing import Any

from paddock.api.kube.body.apply import ANNOTATION, managed_fields, read_owners
from paddock.resources.codec import to_builtins
from paddock.resources.defaults import explicit
from paddock.resources.meta import Resource
from paddock.resources.registry import KindInfo

_PARTIAL = {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1"}


def render(obj: Resource) -> dict[str, Any]:
    """Return an object with all defaults written out."""
    plain = explicit(obj)
    plain["metadata"] = metadata_of(obj)
    return plain


def metadata_of(obj: Resource) -> dict[str, Any]:
    """Return an object's metadata, with field ownership as `managedFields`."""
    metadata: dict[str, Any] = to_builtins(obj.metadata)
    if ANNOTATION in obj.metadata.annotations:
        del metadata["annotations"][ANNOTATION]
        if not metadata["annotations"]:
            del metadata["annotations"]
        owners = read_owners(obj.metadata.annotations)
        metadata["managedFields"] = managed_fields(owners, obj.API_VERSION)
    return metadata


def partial(obj: Resource) -> dict[str, Any]:
    """Return only an object's metadata."""
    return {**_PARTIAL, "metadata": metadata_of(obj)}


def render_list(
    info: KindInfo,
    items: list[dict[str, Any]],
    *,
    version: str,
    continue_token: str = "",
    remaining: int | None = None,
) -> dict[str, Any]:
    """Return a page of objects as a list."""
    return {
        "apiVersion": info.cls.API_VERSION,
        "kind": f"{info.kind}List",
        "metadata": list_metadata(version, continue_token, remaining),
        "items": items,
    }


def list_metadata(version: str, continue_token: str, remaining: int | None) -> dict[str, Any]:
    """Return the metadata of a page: resource version, continue token, remaining items."""
    metadata: dict[str, Any] = {"resourceVersion": version}
    if continue_token:
        metadata["continue"] = continue_token
    if remaining:
        metadata["remainingItemCount"] = remaining
    return metadata


def scale(obj: Resource, info: KindInfo) -> dict[str, Any]:
    """Return an object's scale subresource."""
    paths = info.scale
    plain = explicit(obj)
    metadata = obj.metadata
    status: dict[str, Any] = {"replicas": _number(plain, paths.status_path if paths else "")}
    if paths and paths.selector_path and (selector := _at(plain, paths.selector_path)):
        status["selector"] = selector
    return {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": {
            "name": metadata.name,
            "namespace": metadata.namespace,
            "uid": metadata.uid,
            "resourceVersion": metadata.resource_version,
            "creationTimestamp": plain["metadata"].get("creationTimestamp"),
        },
        "spec": {"replicas": _number(plain, paths.spec_path if paths else "")},
        "status": status,
    }


def _at(plain: Any, path: str) -> Any:
    for part in path.strip(".").split("."):
        plain = plain.get(part) if isinstance(plain, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return plain  # pyright: ignore[reportUnknownVariableType]


def _number(plain: Any, path: str) -> int:
    value = _at(plain, path)
    return value if isinstance(value, int) else 0
