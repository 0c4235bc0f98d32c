"""Metadata keys with a meaning to the server.

Clients that can only send metadata use keys with a reserved prefix for options that E2B's API
lacks. These keys are removed from the metadata; unknown keys with a reserved prefix are refused.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import structs

from paddock.claims.requests import NewSandbox
from paddock.kit.errors import InvalidError
from paddock.resources import quantity
from paddock.resources.kinds.sandbox import IdlePause
from paddock.resources.kinds.template import PauseStrategy, Resources
from paddock.resources.schema import formats

PREFIX = "e2b.agents.kruise.io/"
RESERVED = (
    "agents.kruise.io/",
    "e2b.agents.kruise.io/",
    "security.agents.kruise.io/",
    "paddock.dev/",
)
LABEL_PREFIX = "label:"
_DURATION = re.compile(r"^(\d+)(ms|s|m|h|d)$")
_UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}
_MAX_SECONDS = 10**9
MAX_WAIT_SECONDS = 600
"""The longest wait that a client may request."""
_NUMBER = re.compile(r"^[0-9]{1,10}$")


def apply_extensions(request: NewSandbox) -> NewSandbox:
    """Apply extension keys to the request and keep the rest as metadata."""
    plain: dict[str, str] = {}
    labels: dict[str, str] = dict(request.labels)
    changed = request
    for key, value in request.metadata.items():
        if key.startswith(LABEL_PREFIX):
            name = key.removeprefix(LABEL_PREFIX)
            if name.startswith(RESERVED):
                raise _bad(key, "labels with this prefix are reserved")
            if problem := formats.qualified_name(name) or formats.label_value(value):
                raise _bad(key, problem)
            labels[name] = plain[name] = value
        elif handler := _HANDLERS.get(key):
            changed = handler(changed, key, value)
        elif key.startswith(RESERVED):
            raise _bad(key, "this prefix is reserved, and the key is unknown")
        else:
            plain[key] = value
    return structs.replace(changed, metadata=plain, labels=labels)


def _bad(key: str, message: str) -> InvalidError:
    return InvalidError.at(f"metadata[{key}]", message)


def _seconds(key: str, value: str) -> int:
    if not _NUMBER.match(value) or not 0 < int(value) <= MAX_WAIT_SECONDS:
        raise _bad(key, f"{value!r} is not a positive number of seconds")
    return int(value)


def _flag(key: str, value: str) -> bool:
    if value not in ("true", "false"):
        raise _bad(key, f"{value!r} is neither true nor false")
    return value == "true"


def duration(key: str, value: str) -> int | None:
    """Parse `forever` (None) or a duration such as 30m, in whole seconds."""
    if value == "forever":
        return None
    match = _DURATION.match(value)
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0
    if not 0 < seconds <= _MAX_SECONDS:
        raise _bad(key, f"{value!r} is neither forever nor a duration such as 30m")
    return max(int(seconds), 1)


def _set(field: str, read: Callable[[str, str], Any]) -> "_Handler":
    def handle(request: NewSandbox, key: str, value: str) -> NewSandbox:
        return structs.replace(request, **{field: read(key, value)})

    return handle


def _never(request: NewSandbox, key: str, value: str) -> NewSandbox:
    return structs.replace(request, timeout_seconds=None) if _flag(key, value) else request


def _limit(name: str, read: Callable[[str], int]) -> "_Handler":
    """Return a handler that sets one resource limit and keeps the others."""

    def handle(request: NewSandbox, key: str, value: str) -> NewSandbox:
        try:
            read(value)
        except InvalidError as error:
            raise _bad(key, error.message) from error
        resources = structs.replace(request.resources or Resources(), **{name: value})
        return structs.replace(request, resources=resources)

    return handle


def _image(key: str, value: str) -> str:
    if not value.strip():
        raise _bad(key, "must name an image")
    return value.strip()


def _idle(key: str, value: str) -> IdlePause | None:
    seconds = duration(key, value)
    return None if seconds is None else IdlePause(after_seconds=seconds)


def _strategy(key: str, value: str) -> PauseStrategy:
    # Pausing without memory is chosen per pause (`memory: false`), not here.
    if value not in (PauseStrategy.FREEZE, PauseStrategy.HIBERNATE):
        raise _bad(key, f"must be {PauseStrategy.FREEZE} or {PauseStrategy.HIBERNATE}")
    return PauseStrategy(value)


def _reserve(request: NewSandbox, key: str, value: str) -> NewSandbox:
    if value in ("never", "false"):
        return structs.replace(request, reserve_failed=False)
    seconds = None if value == "true" else duration(key, value) or _MAX_SECONDS
    return structs.replace(request, reserve_failed=True, reserve_failed_seconds=seconds)


def _named(field: str) -> "_Handler":
    def handle(request: NewSandbox, key: str, value: str) -> NewSandbox:
        if request.name or request.name_prefix:
            raise _bad(key, "only one of sandbox-name and sandbox-generate-name can be given")
        name = value.removesuffix("-") if field == "name_prefix" else value
        if problem := formats.dns_label(name):
            raise _bad(key, problem)
        return structs.replace(request, **{field: value})

    return handle


_Handler = Callable[[NewSandbox, str, str], NewSandbox]

_HANDLERS: Mapping[str, _Handler] = {
    f"{PREFIX}claim-timeout-seconds": _set("claim_timeout_seconds", _seconds),
    f"{PREFIX}wait-ready-timeout-seconds": _set("ready_timeout_seconds", _seconds),
    f"{PREFIX}reserve-paused-sandbox-duration": _set("paused_retention_seconds", duration),
    f"{PREFIX}create-on-no-stock": _set("create_on_no_stock", _flag),
    f"{PREFIX}never-timeout": _never,
    f"{PREFIX}image": _set("image", _image),
    f"{PREFIX}cpu-request": _limit("cpu", quantity.millis),
    f"{PREFIX}cpu-limit": _limit("cpu", quantity.millis),
    f"{PREFIX}reserve-failed-sandbox": _reserve,
    f"{PREFIX}reserve-failed-sandbox-for": _reserve,
    f"{PREFIX}sandbox-name": _named("name"),
    f"{PREFIX}sandbox-generate-name": _named("name_prefix"),
    "paddock.dev/never-timeout": _never,
    "paddock.dev/paused-retention": _set("paused_retention_seconds", duration),
    "paddock.dev/pause-strategy": _set("pause_strategy", _strategy),
    "paddock.dev/idle-pause": _set("idle_pause", _idle),
    "paddock.dev/memory-limit": _limit("memory", quantity.whole),
}
