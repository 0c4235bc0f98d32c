"""Logging: constant messages, facts as fields, one line each.

    log.info("sandbox paused", extra=fields(sandbox=key, reason="idle"))

Facts that hold for a whole piece of work (a request's id, a reconcile's) are said once, by
`with bound(request=…)`, and are on every line that is written within.

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
    """Wrap facts for `extra=`."""
    return {_FIELDS: {**_bound.get(), **facts}}


@contextlib.contextmanager
def bound(**facts: object) -> Generator[None]:
    """Put facts on every line written within, in this task and those it starts."""
    before = _bound.set({**_bound.get(), **facts})
    try:
        yield
    finally:
        _bound.reset(before)


class TextFormatter(logging.Formatter):
    """`time level logger message key=value …` for people."""

    def format(self, record: logging.LogRecord) -> str:
        """Render one line, and the traceback below it where there is one."""
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
        """Render one JSON object."""
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
    """Write out what would end a line or steer a terminal: much of it comes from strangers."""
    if not isinstance(value, str) or value.isprintable():
        return value
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in value)


def configure(*, level: str = "info", json: bool = False, stream: TextIO | None = None) -> None:
    """Send every logger's lines to a stream (standard error by default)."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if json else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
