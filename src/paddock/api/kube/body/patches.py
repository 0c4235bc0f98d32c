"""Patches of plain documents: JSON patch, merge patch, strategic merge patch. Pure.

None of them changes its inputs. A patch that cannot be applied raises an `InvalidError` with the
position. Server-side apply is in `body.apply`.
"""

import copy
from collections.abc import Callable
from typing import Any, cast

import msgspec

from paddock.api.kube.body.depth import MAX_DEPTH, is_too_deep
from paddock.kit.errors import ConflictError, FieldProblem, InvalidError
from paddock.resources import strategic_merge

MAX_OPERATIONS = 10_000
MAX_COPIED_BYTES = 3 * 1024 * 1024
"""Limit for all copies of one patch together: each copy could double the document."""
_TOO_DEEP = f"the result is nested too deeply: the limit is {MAX_DEPTH} levels"


def merge_patch(target: Any, patch: Any) -> Any:
    """Apply a merge patch (RFC 7386): null removes, objects merge, other values replace."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    changes = cast("dict[str, Any]", patch)
    result: dict[str, Any] = dict(cast("Any", target)) if isinstance(target, dict) else {}
    for name, value in changes.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merge_patch(result.get(name), value)
    return result


# ---- JSON patch ------------------------------------------------------------------------------


def json_patch(target: Any, operations: Any) -> Any:
    """Apply a JSON patch (RFC 6902) atomically."""
    if not isinstance(operations, list):
        raise _refused("", "a JSON patch must be a list of operations")
    steps = cast("list[Any]", operations)
    if len(steps) > MAX_OPERATIONS:
        raise _refused("", f"a JSON patch has at most {MAX_OPERATIONS} operations")
    document, copied, where = target, 0, ""
    try:
        document = copy.deepcopy(target)
        for index, step in enumerate(steps):
            where = f"[{index}]"
            copied += _copied_bytes(document, step, where)
            if copied > MAX_COPIED_BYTES:
                raise _refused(where, f"a patch copies at most {MAX_COPIED_BYTES} bytes")
            document = _step(document, step, where)
    except RecursionError as error:
        raise _refused(where, _TOO_DEEP) from error
    if is_too_deep(document):
        raise _refused("", _TOO_DEEP)
    return document


def _copied_bytes(document: Any, step: Any, where: str) -> int:
    if not isinstance(step, dict) or cast("dict[str, Any]", step).get("op") != "copy":
        return 0
    source = _pointer(cast("dict[str, Any]", step), "from", where)
    return len(msgspec.json.encode(_value_at(document, source, where)))


def _step(document: Any, step: Any, where: str) -> Any:
    if not isinstance(step, dict):
        raise _refused(where, "an operation must be an object with op and path")
    operation = cast("dict[str, Any]", step)
    name = operation.get("op")
    handler = _OPERATIONS.get(name) if isinstance(name, str) else None
    if handler is None:
        raise _refused(f"{where}.op", f"{name!r} is not one of {', '.join(_OPERATIONS)}")
    return handler(document, operation, where)


def _add(document: Any, operation: dict[str, Any], where: str) -> Any:
    value = copy.deepcopy(_needed(operation, where))
    path = _pointer(operation, "path", where)
    if not path:
        return value
    parent, last = _parent(document, path, where)
    if isinstance(parent, list):
        items = cast("list[Any]", parent)
        index = len(items) if last == "-" else _index(last, len(items) + 1, where)
        items.insert(index, value)
    else:
        parent[last] = value
    return document


def _remove(document: Any, operation: dict[str, Any], where: str) -> Any:
    path = _pointer(operation, "path", where)
    if not path:
        raise _refused(f"{where}.path", "the whole document cannot be removed")
    parent, last = _parent(document, path, where)
    if isinstance(parent, list):
        items = cast("list[Any]", parent)
        del items[_index(last, len(items), where)]
    elif last in parent:
        del parent[last]
    else:
        raise _refused(f"{where}.path", f"there is no value at {operation['path']!r}")
    return document


def _replace(document: Any, operation: dict[str, Any], where: str) -> Any:
    value = copy.deepcopy(_needed(operation, where))
    path = _pointer(operation, "path", where)
    if not path:
        return value
    _value_at(document, path, where)
    parent, last = _parent(document, path, where)
    if isinstance(parent, list):
        items = cast("list[Any]", parent)
        items[_index(last, len(items), where)] = value
    else:
        parent[last] = value
    return document


def _move(document: Any, operation: dict[str, Any], where: str) -> Any:
    source = _pointer(operation, "from", where)
    path = _pointer(operation, "path", where)
    if path[: len(source)] == source and path != source:
        raise _refused(f"{where}.path", "a value cannot be moved into itself")
    value = _value_at(document, source, where)
    document = _remove(document, {"path": operation["from"]}, where)
    return _add(document, {"path": operation["path"], "value": value}, where)


def _copy(document: Any, operation: dict[str, Any], where: str) -> Any:
    value = _value_at(document, _pointer(operation, "from", where), where)
    return _add(document, {"path": operation.get("path"), "value": value}, where)


def _test(document: Any, operation: dict[str, Any], where: str) -> Any:
    path = _pointer(operation, "path", where)
    if not _same(_value_at(document, path, where), _needed(operation, where)):
        raise _refused(f"{where}.path", f"the value at {operation['path']!r} is different")
    return document


_OPERATIONS: dict[str, Callable[[Any, dict[str, Any], str], Any]] = {
    "add": _add,
    "remove": _remove,
    "replace": _replace,
    "move": _move,
    "copy": _copy,
    "test": _test,
}


def _same(left: Any, right: Any) -> bool:
    """Compare as JSON does: `true` is not 1, at any depth."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, dict) and isinstance(right, dict):
        one, other = cast("dict[str, Any]", left), cast("dict[str, Any]", right)
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(left, list) and isinstance(right, list):
        these, those = cast("list[Any]", left), cast("list[Any]", right)
        return len(these) == len(those) and all(map(_same, these, those))
    return left == right


def _needed(operation: dict[str, Any], where: str) -> Any:
    if "value" not in operation:
        raise _refused(f"{where}.value", "is needed")
    return operation["value"]


def _pointer(operation: dict[str, Any], field: str, where: str) -> list[str]:
    text = operation.get(field)
    if not isinstance(text, str) or (text and not text.startswith("/")):
        raise _refused(f"{where}.{field}", f"{text!r} is not a path such as /spec/replicas")
    return [part.replace("~1", "/").replace("~0", "~") for part in text.split("/")[1:]]


def _value_at(document: Any, path: list[str], where: str) -> Any:
    for part in path:
        if isinstance(document, list):
            items = cast("list[Any]", document)
            document = items[_index(part, len(items), where)]
        elif isinstance(document, dict) and part in document:
            document = cast("Any", document[part])
        else:
            raise _refused(f"{where}.path", f"there is no value at {'/' + '/'.join(path)!r}")
    return document


def _parent(document: Any, path: list[str], where: str) -> tuple[Any, str]:
    parent = _value_at(document, path[:-1], where)
    if not isinstance(parent, (dict, list)):
        raise _refused(
            f"{where}.path", f"the value at {'/' + '/'.join(path[:-1])!r} is not an object or list"
        )
    return cast("Any", parent), path[-1]


def _index(text: str, size: int, where: str) -> int:
    if not (text.isascii() and text.isdigit()) or len(text) > 9 or (text[0] == "0" and text != "0"):
        raise _refused(f"{where}.path", f"{text[:40]!r} is not a position in a list")
    if int(text) >= size:
        raise _refused(f"{where}.path", f"position {text} is beyond the end of the list")
    return int(text)


# ---- strategic merge patch -------------------------------------------------------------------


def strategic_patch(target: Any, patch: Any) -> Any:
    """Apply a strategic merge patch: a merge patch that matches items of some lists by a key."""
    if not isinstance(patch, dict):
        raise _refused("", "a strategic merge patch must be an object")
    return strategic_merge.merge(target, cast("dict[str, Any]", patch))


def _refused(path: str, message: str) -> InvalidError:
    problem = FieldProblem(path, message)
    return InvalidError(f"the patch cannot be applied: {problem}", problems=[problem])


def check_version(live_version: str, patched: Any) -> None:
    """Raise `ConflictError` if a patch names a version other than the current one."""
    metadata = patched.get("metadata") if isinstance(patched, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    named = cast("Any", metadata).get("resourceVersion") if isinstance(metadata, dict) else None
    if named and named != live_version:
        raise ConflictError(
            f"the patch was made for version {named}, but the object is at {live_version}",
            hint="read it again and apply the change to what you get",
        )
