"""Parsing of requests: query options, Accept headers and bodies.

Malformed requests are refused here, before any object is read.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

import msgspec
import yaml
from msgspec import Struct
from starlette.requests import Request

from paddock.api.kube.body import protobuf
from paddock.api.kube.body.depth import MAX_DEPTH, is_too_deep
from paddock.api.kube.settings import KubeApiSettings
from paddock.api.kube.status import BadRequestError, UnsupportedMediaTypeError
from paddock.kit.errors import FieldProblem, InvalidError, TooLargeError
from paddock.store.port import Propagation

_DRAINED_BYTES = 32 << 20
"""How much of an oversized body is read and discarded, so that the client gets the response."""
_JSON_TYPES = {"", "application/json", "*/*"}
_YAML_TYPES = {"application/yaml", "application/apply-patch+yaml"}


class AcceptedFormat(Struct, frozen=True):
    """A form of objects that the client accepts."""

    form: str = ""
    """Empty (plain objects), `Table`, `PartialObjectMetadata` and so on."""
    version: str = "v1"


def parse_accept(header: str) -> list[AcceptedFormat] | None:
    """Parse an Accept header, best first; None if JSON is not accepted."""
    found: list[AcceptedFormat] = []
    for item in header.split(",") if header.strip() else ["*/*"]:
        media, *parameters = (part.strip() for part in item.split(";"))
        if media in ("application/json", "application/*", "*/*"):
            options = {
                name: value for name, _, value in (part.partition("=") for part in parameters)
            }
            found.append(AcceptedFormat(options.get("as", ""), options.get("v", "v1")))
    return found or None


def flag(request: Request, name: str) -> bool:
    """Return a boolean option."""
    return request.query_params.get(name, "").lower() in ("true", "1")


def number(request: Request, name: str) -> int | None:
    """Return a non-negative number option, or None."""
    text = request.query_params.get(name, "")
    if not text:
        return None
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise _bad(name, f"{text[:40]!r} is not a number")
    return int(text)


def is_dry_run(request: Request, options: Mapping[str, Any] | None = None) -> bool:
    """Whether the request is a dry run."""
    values = request.query_params.getlist("dryRun")
    given = (options or {}).get("dryRun")
    if isinstance(given, list):
        values = [*values, *(str(item) for item in cast("list[Any]", given))]
    if unknown := [item for item in values if item != "All"]:
        raise _bad("dryRun", f"{unknown[0][:40]!r} is not supported; the only value is All")
    return bool(values)


def field_validation(request: Request) -> str:
    """Return the policy for unknown fields; the default is Strict."""
    text = request.query_params.get("fieldValidation") or "Strict"
    if text not in ("Strict", "Warn", "Ignore"):
        raise _bad("fieldValidation", f"{text[:40]!r} is not one of Strict, Warn, Ignore")
    return text


class DeleteOptions(Struct, frozen=True, kw_only=True):
    """Options of a deletion."""

    propagation: Propagation = Propagation.BACKGROUND
    uid: str | None = None
    resource_version: str | None = None
    is_dry_run: bool = False


def delete_options(request: Request, body: Any) -> DeleteOptions:
    """Parse the options of a deletion, from the body and the query."""
    if body is not None and not isinstance(body, dict):
        raise BadRequestError("the body of a deletion must be a DeleteOptions object")
    options = cast("dict[str, Any]", body or {})
    text = options.get("propagationPolicy") or request.query_params.get("propagationPolicy")
    if not text and options.get("orphanDependents") is True:
        text = Propagation.ORPHAN
    try:
        propagation = Propagation(text) if text else Propagation.BACKGROUND
    except ValueError as error:
        names = ", ".join(Propagation)
        problem = FieldProblem("propagationPolicy", f"{str(text)[:40]!r} is not one of {names}")
        raise InvalidError(str(problem), problems=[problem]) from error
    conditions = options.get("preconditions")
    conditions = cast("dict[str, Any]", conditions) if isinstance(conditions, dict) else {}
    for name in ("uid", "resourceVersion"):
        if not isinstance(conditions.get(name), (str, type(None))):
            raise _bad(f"preconditions.{name}", "must be text")
    return DeleteOptions(
        propagation=propagation,
        uid=conditions.get("uid"),
        resource_version=conditions.get("resourceVersion"),
        is_dry_run=is_dry_run(request, options),
    )


def media_type(request: Request) -> str:
    """Return the media type of the body, without parameters."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def read_document(request: Request, settings: KubeApiSettings) -> Any:
    """Parse the body as JSON, YAML or protobuf, by its media type; None if it is empty."""
    kind = media_type(request)
    data = await read_body(request, settings)
    if not data:
        return None
    if kind == protobuf.MEDIA_TYPE:
        return protobuf.decode(data)
    if kind not in _JSON_TYPES and kind not in _YAML_TYPES:
        raise UnsupportedMediaTypeError(
            f"bodies of type {kind[:80]!r} are not supported", hint="send application/json"
        )
    return parse(data, is_yaml=kind in _YAML_TYPES, max_yaml_bytes=settings.max_yaml_bytes)


async def read_body(request: Request, settings: KubeApiSettings) -> bytes:
    """Read the body, up to the size limit."""
    limit = settings.max_body_bytes
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > _DRAINED_BYTES:
            break
        if size <= limit:
            chunks.append(chunk)
    if size > limit:
        raise TooLargeError(f"the body is larger than the limit of {limit} bytes")
    return b"".join(chunks)


def parse(data: bytes, *, is_yaml: bool = False, max_yaml_bytes: int = 1 << 20) -> Any:
    """Parse JSON or YAML; errors name the position."""
    try:
        document = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        if not is_yaml:
            raise BadRequestError(f"the body is not JSON: {error}") from error
        document = _parse_yaml(data, max_yaml_bytes)
    if is_too_deep(document):
        raise BadRequestError(f"the body is nested more than {MAX_DEPTH} levels deep")
    return document


class _PlainLoader(yaml.CSafeLoader):
    """Loads dates as text: the kinds define which fields are times."""


_PlainLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.CSafeLoader.yaml_implicit_resolvers.items()
}


def _parse_yaml(data: bytes, limit: int) -> Any:
    if len(data) > limit:
        raise TooLargeError(f"YAML of more than {limit} bytes is not supported", hint="send JSON")
    try:
        # Aliases can expand a small text to an enormous document.
        events = cast("Iterator[yaml.Event]", yaml.parse(data, yaml.CSafeLoader))  # pyright: ignore[reportUnknownMemberType]
        if any(isinstance(event, yaml.AliasEvent) for event in events):
            raise BadRequestError("YAML with aliases is not supported")
        document: Any = yaml.load(data, _PlainLoader)  # noqa: S506 - derived from the safe loader
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise BadRequestError(f"the body is not YAML: {error}") from error
    return _checked(document, MAX_DEPTH)


def _checked(value: Any, depth: int) -> Any:
    """Refuse values that YAML has and JSON has not."""
    if depth == 0:
        raise BadRequestError(f"the body is nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, dict):
        items = cast("dict[Any, Any]", value)
        if not all(isinstance(key, str) for key in items):
            raise BadRequestError("every key in the body must be text")
        return {key: _checked(item, depth - 1) for key, item in items.items()}
    if isinstance(value, list):
        return [_checked(item, depth - 1) for item in cast("list[Any]", value)]
    if isinstance(value, float) and not math.isfinite(value):
        raise BadRequestError("every number in the body must be finite")
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    raise BadRequestError(f"the body contains a {type(value).__name__}, which JSON does not have")


def _bad(field: str, message: str) -> BadRequestError:
    problem = FieldProblem(field, message)
    return BadRequestError(str(problem), problems=[problem])
