"""Get and list, in the form that the client accepts."""

import asyncio
from collections.abc import Callable
from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from msgspec import Struct, structs
from starlette.requests import Request
from starlette.responses import Response

from paddock.api.kube import key_access
from paddock.api.kube.context import KubeCall, json_response
from paddock.api.kube.rendering import partial, render, render_list, scale
from paddock.api.kube.requests import number, parse_accept
from paddock.api.kube.status import BadRequestError, NotAcceptableError
from paddock.api.kube.tables import table
from paddock.kit.errors import FieldProblem, ForbiddenError, GoneError
from paddock.resources.meta import Resource
from paddock.resources.selectors import (
    FieldSelector,
    LabelSelector,
    parse_fields,
    parse_labels,
)
from paddock.store.port import Page

STORED = "Stored"
"""The form of a watch without defaults, for clients that list it first in Accept."""
_BATCH = 100
_FORMS = {"", "Table", "PartialObjectMetadata", "PartialObjectMetadataList"}


async def get(call: KubeCall) -> Response:
    """Return one object."""
    form = negotiate_form(call.request)
    obj = call.shown(await call.read(call.target.key))
    return json_response(render_form(call, obj, form))


async def get_scale(call: KubeCall) -> Response:
    """Return the scale of one object."""
    obj = await call.read(call.target.key)
    return json_response(scale(obj, call.target.info))


async def list_objects(call: KubeCall) -> Response:
    """Return a page of objects."""
    form = negotiate_form(call.request)
    page = await read_page(call)
    info = call.target.info
    if form == "Table":
        document = table(
            info,
            page.items,
            now=call.context.clock.now(),
            include=included_object(call.request),
            version=page.version,
            continue_token=page.continue_token,
            remaining=page.remaining,
        )
        return json_response(document)
    shown: Callable[[Resource], dict[str, Any]] = partial if form else render
    items: list[dict[str, Any]] = []
    for index, obj in enumerate(page.items):
        items.append(shown(obj))
        if index % _BATCH == _BATCH - 1:
            await asyncio.sleep(0)  # a long list must not block other requests
    document = render_list(
        info,
        items,
        version=page.version,
        continue_token=page.continue_token,
        remaining=page.remaining,
    )
    if form:
        document |= {"kind": "PartialObjectMetadataList", "apiVersion": "meta.k8s.io/v1"}
    return json_response(document)


async def read_page(call: KubeCall) -> Page[Resource]:
    """Read the requested page from the store."""
    query = call.request.query_params
    exact = _exact_version(call.request)
    page = await call.store.list(
        call.target.info.cls,
        namespace=call.target.namespace,
        labels=label_selector(call),
        fields=field_selector(call),
        limit=number(call.request, "limit"),
        continue_token=query.get("continue", ""),
    )
    if exact is not None and page.version != exact:
        raise GoneError(
            f"version {exact} is no longer available: the current version is {page.version}"
        )
    if key_access.hides_variables(call.caller):
        page = structs.replace(page, items=tuple(map(call.shown, page.items)))
    return page


def _exact_version(request: Request) -> str | None:
    """Return the exact version that a list must have, or None if any current one will do."""
    query = request.query_params
    match, version = query.get("resourceVersionMatch", ""), query.get("resourceVersion", "")
    if not match:
        return None
    if match not in ("Exact", "NotOlderThan"):
        raise _bad("resourceVersionMatch", f"{match[:40]!r} is not one of Exact, NotOlderThan")
    if match == "NotOlderThan":
        return None
    if version in ("", "0") or len(version) > 40:
        raise _bad("resourceVersionMatch", "Exact needs a resourceVersion")
    return version


def render_form(call: KubeCall, obj: Resource, form: str) -> dict[str, Any]:
    """Return one object in a form."""
    if form == "Table":
        return table(
            call.target.info,
            (obj,),
            now=call.context.clock.now(),
            include=included_object(call.request),
            version=obj.metadata.resource_version,
        )
    return partial(obj) if form else render(obj)


def negotiate_form(request: Request) -> str:
    """Return the first form in the Accept header that is supported."""
    options = parse_accept(request.headers.get("accept", ""))
    if options is None:
        raise NotAcceptableError(
            "none of the formats in Accept is supported", hint="accept application/json"
        )
    for option in options:
        if option.form in _FORMS and option.version in ("v1", "v1beta1"):
            return option.form
    raise NotAcceptableError("none of the forms in Accept is supported")


def wants_stored(request: Request) -> bool:
    """Whether a watch may omit defaults, as stored objects do. Paddock's own processes have the
    defaults, and writing them out is most of the cost of a watch."""
    options = parse_accept(request.headers.get("accept", ""))
    return bool(options) and options[0].form == STORED


def included_object(request: Request) -> str:
    """Return which object data each row of a table carries."""
    text = request.query_params.get("includeObject") or "Metadata"
    if text not in ("None", "Metadata", "Object"):
        raise _bad("includeObject", f"{text[:40]!r} is not one of None, Metadata, Object")
    return text


def label_selector(call: KubeCall) -> LabelSelector | None:
    """Parse the label selector. Objects that the caller must not see are left out."""
    text = call.request.query_params.get("labelSelector", "")
    hidden = call.label_term
    if not text.strip():
        return None if hidden is None else LabelSelector((hidden,))
    selector = parse_labels(text)
    return selector if hidden is None else LabelSelector((*selector.requirements, hidden))


def field_selector(call: KubeCall) -> FieldSelector | None:
    """Parse the field selector; a field that the kind does not have is an error.

    Objects of other teams are left out.
    """
    text = call.request.query_params.get("fieldSelector", "")
    owner = call.owner_term
    if not text.strip():
        return None if owner is None else FieldSelector((owner,))
    selector = parse_fields(text)
    for term in selector.terms:
        if key_access.is_about_variables(term) and key_access.hides_variables(call.caller):
            raise ForbiddenError("this key may not select by annotations or variables")
        if not _exists(call.target.info.cls, term.path):
            path = ".".join(term.path)
            raise _bad("fieldSelector", f"{path[:80]!r} is not a field of {call.target.info.kind}")
    return selector if owner is None else FieldSelector((*selector.terms, owner))


@cache
def _exists(kind: Any, path: tuple[str, ...]) -> bool:
    if not path:
        return True
    if get_origin(kind) in (Union, UnionType):
        return any(_exists(option, path) for option in get_args(kind))
    if isinstance(kind, type) and issubclass(kind, Struct):
        hints = get_type_hints(kind)
        for field in structs.fields(kind):
            if field.encode_name == path[0]:
                return _exists(hints[field.name], path[1:])
        return False
    arguments = get_args(kind)
    return len(arguments) == 2 and get_origin(kind) is not tuple


def _bad(field: str, message: str) -> BadRequestError:
    problem = FieldProblem(field, message)
    return BadRequestError(str(problem), problems=[problem])
