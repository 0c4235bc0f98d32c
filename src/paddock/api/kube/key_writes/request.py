"""The input of the rules for writes of API keys, and what they share. Pure."""

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any, TypeVar

import msgspec
from msgspec import Struct, structs

from paddock.claims.caller import Caller
from paddock.claims.validation import MAX_TIMEOUT_SECONDS
from paddock.kit.errors import FieldProblem
from paddock.resources.default_limits import (
    DEFAULT_CPU_MILLIS,
    DEFAULT_DISK_BYTES,
    DEFAULT_MEMORY_BYTES,
    DEFAULT_PIDS,
)
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.kinds.template import NetworkPolicy
from paddock.resources.meta import ANNOTATION_KEY, GROUP, Resource, with_meta


class KeyLimits(Struct, frozen=True, kw_only=True):
    """The bounds of what one team's keys write."""

    max_timeout_seconds: int = MAX_TIMEOUT_SECONDS
    ceiling: NetworkPolicy | None = None
    """The network policy of team and installation."""
    images: tuple[str, ...] = ("base",)
    """Patterns (fnmatch) of images that templates may name."""
    cpu_millis: int = DEFAULT_CPU_MILLIS
    memory_bytes: int = DEFAULT_MEMORY_BYTES
    disk_bytes: int = DEFAULT_DISK_BYTES
    pids: int = DEFAULT_PIDS


class KeyWrite(Struct, frozen=True, kw_only=True):
    """One write of an API key."""

    caller: Caller
    limits: KeyLimits
    now: datetime
    source: Sandbox | None = None
    """The sandbox that a checkpoint names, if it exists."""


class Checked(Struct, frozen=True):
    """The object to store, and why it is refused, if it is."""

    object: Resource
    problems: tuple[FieldProblem, ...] = ()


def is_system(name: str) -> bool:
    """Whether a label or annotation is one that Paddock uses."""
    prefix, slash, _ = name.partition("/")
    return bool(slash) and (prefix == GROUP or prefix.endswith(f".{GROUP}"))


def with_system_metadata(caller: Caller, old: Resource | None, new: Resource) -> Checked:
    """Keep what the system wrote to the metadata; a value that differs is a problem.

    A new object is marked with the key that created it.
    """
    before = old.metadata if old is not None else None
    problems: list[FieldProblem] = []
    kept: dict[str, Mapping[str, str]] = {}
    for field in ("labels", "annotations"):
        given: Mapping[str, str] = getattr(new.metadata, field)
        known: Mapping[str, str] = getattr(before, field) if before is not None else {}
        problems += system_problems(f"metadata.{field}", given, known)
        system = {name: value for name, value in known.items() if is_system(name)}
        kept[field] = {name: value for name, value in given.items() if not is_system(name)} | system
    if old is None and caller.key_id:
        kept["annotations"] = {**kept["annotations"], ANNOTATION_KEY: caller.key_id}
    for field, path in (("finalizers", "finalizers"), ("owner_references", "ownerReferences")):
        known_items = getattr(before, field) if before is not None else ()
        if getattr(new.metadata, field) != known_items:
            problems.append(FieldProblem(f"metadata.{path}", "only the system sets them"))
    return Checked(with_meta(new, **kept), tuple(problems))


def system_problems(
    path: str, given: Mapping[str, str], known: Mapping[str, str] | None = None
) -> list[FieldProblem]:
    """Return the labels or annotations of the system that a key sets or changes."""
    return [
        FieldProblem(f"{path}[{name}]", f"only the system sets labels and annotations of {GROUP}")
        for name, value in given.items()
        if is_system(name) and (known or {}).get(name) != value
    ]


def changed(
    old: Struct, new: Struct, *, except_for: Iterable[str], path: str
) -> list[FieldProblem]:
    """Return a problem for each field that differs and is not listed."""
    allowed = frozenset(except_for)
    return [
        FieldProblem(f"{path}.{field.encode_name}", "an API key cannot change it")
        for field in structs.fields(type(new))
        if field.name not in allowed
        and not _is_same(getattr(old, field.name), getattr(new, field.name))
    ]


def _is_same(old: Any, new: Any) -> bool:
    # A document leaves empty objects out: an empty one and none are the same to clients.
    return old == new or (_is_empty(old) and _is_empty(new))


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, Struct) and not msgspec.to_builtins(value))


S = TypeVar("S", bound=Struct)


def with_changes(old: S, new: S, names: Iterable[str]) -> S:
    """Return the old struct with the named fields of the new one."""
    return structs.replace(old, **{name: getattr(new, name) for name in names})


def end_problems(
    path: str, before: datetime | None, end: datetime | None, write: KeyWrite
) -> list[FieldProblem]:
    """Return a problem if an end is later than the longest timeout allows."""
    longest = write.limits.max_timeout_seconds
    if end is None or end == before or end.tzinfo is None:
        return []  # a time without a zone is refused by the schema
    if end <= write.now + timedelta(seconds=longest):
        return []
    return [FieldProblem(path, f"at most {longest} seconds from now")]


def needed_end_problems(path: str, end: datetime | None, write: KeyWrite) -> list[FieldProblem]:
    """Return a problem if sandboxes would have no end where each needs one."""
    longest = write.limits.max_timeout_seconds
    if end is not None or longest >= MAX_TIMEOUT_SECONDS:
        return []
    return [FieldProblem(path, f"sandboxes need an end here, at most {longest} seconds from now")]
