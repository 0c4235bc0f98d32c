"""Where kinds and objects are in the Kubernetes API."""

from urllib.parse import quote

from paddock.kit.errors import FieldProblem, InvalidError
from paddock.resources.kinds.builtin import Lease
from paddock.resources.meta import GROUP, Key, Resource


def is_written_whole(kind: type[Resource]) -> bool:
    """Whether we know everything in objects of a kind: our own, and the Leases that we hold."""
    return kind is Lease or kind.API_VERSION.startswith(GROUP + "/")


def collection_path(kind: type[Resource], namespace: str | None) -> str:
    """Where objects of a kind are listed and created; all namespaces when none is named."""
    root = f"/apis/{kind.API_VERSION}" if "/" in kind.API_VERSION else f"/api/{kind.API_VERSION}"
    if kind.NAMESPACED and namespace:
        return f"{root}/namespaces/{_segment('metadata.namespace', namespace)}/{kind.PLURAL}"
    return f"{root}/{kind.PLURAL}"


def object_path(kind: type[Resource], key: Key) -> str:
    """Where one object is."""
    if kind.NAMESPACED and not key.namespace:
        raise _invalid("metadata.namespace", f"a {kind.KIND} lives in a namespace; name it")
    name = _segment("metadata.name", key.name)
    return f"{collection_path(kind, key.namespace)}/{name}"


def _segment(field: str, text: str) -> str:
    # An empty name would address the whole collection, and dots another path.
    if text in ("", ".", ".."):
        raise _invalid(field, f"{text!r} is not a name")
    return quote(text, safe="")


def _invalid(field: str, message: str) -> InvalidError:
    problem = FieldProblem(field, message)
    return InvalidError(str(problem), problems=[problem])
