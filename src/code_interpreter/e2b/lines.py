"""Events as lines of the stream. Pure.

Each line is one JSON object. Everything outside ASCII is escaped: clients split lines at other
characters too, such as U+2028.
"""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from code_interpreter.kernels.events import Accepted, Ended, Event, Failure, Output, Result

_FORMATS = {
    "text/plain": "text",
    "text/html": "html",
    "text/markdown": "markdown",
    "image/svg+xml": "svg",
    "image/png": "png",
    "image/jpeg": "jpeg",
    "application/pdf": "pdf",
    "text/latex": "latex",
    "application/json": "json",
    "application/javascript": "javascript",
    "e2b/data": "data",
    "e2b/chart": "chart",
}
_OBJECTS = frozenset(("json", "data", "chart"))
KEEPALIVE = b'{"type": "keepalive"}\n'


def line_of(event: Event, now: datetime | None = None) -> bytes:
    """Return the line of an event."""
    return (json.dumps(_fields(event, now or datetime.now(UTC))) + "\n").encode("ascii")


def _fields(event: Event, now: datetime) -> Mapping[str, Any]:
    match event:
        case Accepted(execution_count=count):
            return {"type": "number_of_executions", "execution_count": count}
        case Output(stream=stream, text=text):
            kind = "stderr" if stream == "stderr" else "stdout"
            return {"type": kind, "text": text, "timestamp": _timestamp(now)}
        case Result():
            return {"type": "result", **result_fields(event)}
        case Failure(name=name, value=value, traceback=traceback):
            return {"type": "error", "name": name, "value": value, "traceback": traceback}
        case Ended():
            return {"type": "end_of_execution"}


def result_fields(result: Result) -> Mapping[str, Any]:
    """Return the formats of a result by the names of the protocol; other ones are `extra`."""
    fields: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    for kind, value in result.data.items():
        if value is None:
            continue
        name = _FORMATS.get(kind)
        if name is None:
            extra[kind] = value
        else:
            fields[name] = value if name in _OBJECTS else _text(value, name)
    return {**fields, "is_main_result": result.is_main, "extra": extra}


def _text(value: Any, name: str) -> str:
    """Return a format that is text. A representation has no quotes of a string.

    The code may display other values as such, which clients could not read.
    """
    text = str(value)
    if name == "text" and len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    return text


def _timestamp(now: datetime) -> str:
    return now.isoformat(timespec="microseconds").replace("+00:00", "Z")
