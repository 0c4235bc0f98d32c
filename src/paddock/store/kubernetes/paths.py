"""URL paths of kinds and objects in the Kubernetes API."""

from urllib.parse import quote

from paddock.kit.errors import FieldProblem, InvalidError
from paddock.resources.kinds.builtin import Lease
from paddock.resources.meta import GROUP, Key, Resource


def is_fully_modelled(kind: type[Resource]) -> bool:
    """Whether the struct of a kind has all its fields: Paddock's own kinds, and Lease."""
    return kind is Lease or kind.API_VERSION.startswith(GROUP + "/")


def collection_path(kind: type[Resource], namespace: str | None) -> str:
    """Return the path of a collection; without a namespace, of all namespaces."""
    root = f"/apis/{kind.API_VERSION}" if "/" in kind.API_VERSION else f"/api/{kind.API_VERSION}"
    if kind.NAMESPACED and namespace:
        return f"{root}/namespaces/{_segment('metadata.namespace', namespace)}/{kind.PLURAL}"
    return f"{root}/{kind.PLURAL}"


def object_path(kind: type[Resource], key: Key) -> str:
    if kind.NAMESPACED and not key.namespace:
        raise _invalid("metadata.namespace", f"is required: {kind.KIND} is namespaced")
    name = _segment("metadata.name", key.name)
    return f"{collection_path(kind, key.namespace)}/{name}"


def _segment(field: str, text: str) -> str:
    # An empty name would address the collection, and dots another path.
    if text in ("", ".", ".."):
        raise _invalid(field, f"{text!r} is not a valid name")
    return quote(text, safe="")


def _invalid(field: str, message: str) -> InvalidError:
    problem = FieldProblem(field, message)
    return InvalidError(str(problem), problems=[problem])
