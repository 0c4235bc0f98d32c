"""Bodies of requests, parsed and checked. Pure."""

import json
from dataclasses import dataclass, field
from typing import Any, cast

from code_interpreter.kernels import variables


class BadRequestError(Exception):
    """A request is malformed. The message says how."""


@dataclass(frozen=True)
class ExecuteRequest:
    """Body of POST /execute."""

    code: str
    context_id: str | None = None
    language: str | None = None
    env_vars: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class ContextRequest:
    """Body of POST /contexts."""

    language: str | None = None
    cwd: str | None = None


def parse_execute(body: bytes) -> ExecuteRequest:
    """Parse the body of POST /execute."""
    fields = _fields(body)
    code = fields.get("code")
    if not isinstance(code, str):
        raise BadRequestError("code: a string is required")
    context_id, language = _optional(fields, "context_id"), _optional(fields, "language")
    if context_id is not None and language is not None:
        raise BadRequestError("Only one of context_id or language can be provided")
    return ExecuteRequest(code, context_id, language, _variables(fields.get("env_vars")))


def parse_context(body: bytes) -> ContextRequest:
    """Parse the body of POST /contexts."""
    fields = _fields(body or b"{}")
    return ContextRequest(_optional(fields, "language"), _optional(fields, "cwd"))


def _fields(body: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        raise BadRequestError("the body is not JSON") from None
    if not isinstance(parsed, dict):
        raise BadRequestError("the body is not a JSON object")
    return cast("dict[str, Any]", parsed)


def _optional(fields: dict[str, Any], name: str) -> str | None:
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise BadRequestError(f"{name}: a string is required")
    return value or None


def _variables(value: Any) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadRequestError("env_vars: an object is required")
    fields = cast("dict[str, Any]", value)
    if any(not isinstance(text, str) for text in fields.values()):
        raise BadRequestError("env_vars: values have to be strings")
    if problem := variables.problem(fields):
        raise BadRequestError(f"env_vars: {problem}")
    return fields
