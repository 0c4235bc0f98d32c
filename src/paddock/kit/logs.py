"""Logging: constant messages with fields, one line each.

    log.info("sandbox paused", extra=fields(sandbox=key, reason="idle"))

Fields of a whole unit of work (a request's id, a reconcile's) are set once, by
`with bound(request=…)`, and appear on every line logged within.

`configure()` is called once by the program; libraries only get loggers.
"""

import contextlib
import logging
import sys
from collections.abc import Generator, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, TextIO

import msgspec

_FIELDS = "paddock_fields"
_bound: ContextVar[Mapping[str, object]] = ContextVar("paddock_bound_facts", default={})  # noqa: B039 - never written to


def fields(**facts: object) -> dict[str, Any]:
    """Return fields for `extra=`, together with the bound ones."""
    return {_FIELDS: {**_bound.get(), **facts}}


@contextlib.contextmanager
def bound(**facts: object) -> Generator[None]:
    """Add fields to every line logged within, in this task and those it starts."""
    before = _bound.set({**_bound.get(), **facts})
    try:
        yield
    finally:
        _bound.reset(before)


class TextFormatter(logging.Formatter):
    """`time level logger message key=value …` for people."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line, and the traceback below it if there is one."""
        moment = datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3]
        facts: dict[str, object] = getattr(record, _FIELDS, {})
        line = f"{moment}Z {record.levelname.lower():7} {record.name} {record.getMessage()}"
        line += "".join(f" {key}={_visible(_plain(value))}" for key, value in facts.items())
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object a line, for collectors."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one JSON object."""
        facts: dict[str, object] = getattr(record, _FIELDS, {})
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **{key: _plain(value) for key, value in facts.items()},
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(entry).decode()


def _plain(value: object) -> object:
    return value if isinstance(value, (str, int, float, bool)) or value is None else str(value)


def _visible(value: object) -> object:
    """Escape newlines and control characters: many values come from untrusted clients."""
    if not isinstance(value, str) or value.isprintable():
        return value
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in value)


def configure(*, level: str = "info", json: bool = False, stream: TextIO | None = None) -> None:
    """Send all log lines to a stream (default: standard error)."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if json else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
