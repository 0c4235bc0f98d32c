"""Create, update, patch, apply and delete.

A patch is read, applied and written by compare-and-swap, again when somebody was faster. Nothing
is written before the whole request has been understood.
"""

import base64
from collections.abc import Awaitable, Callable
from typing import Any, cast

from msgspec import Struct, structs
from starlette.responses import Response

from paddock.api.kube import apply as server_side
from paddock.api.kube import patches
from paddock.api.kube.context import Call, answer, warnings_header
from paddock.api.kube.reading import read_page, show, wanted_form
from paddock.api.kube.rendering import render, render_list, scale
from paddock.api.kube.requests import (
    DeleteOptions,
    delete_options,
    field_validation,
    flag,
    is_dry_run,
    media_type,
    parse,
    read_body,
    read_document,
)
from paddock.api.kube.status import BadRequestError, UnsupportedMediaTypeError, success
from paddock.kit.errors import (
    AlreadyExistsError,
    ConflictError,
    FieldProblem,
    InvalidError,
    NotFoundError,
)
from paddock.resources import codec
from paddock.resources.builtin import Namespace, Secret
from paddock.resources.meta import Resource, with_meta

_ATTEMPTS = 64
"""A patch loses against at most so many others before its client hears of it."""
_APPLY = "application/apply-patch+yaml"
_PATCHES: dict[str, Callable[[Any, Any], Any]] = {
    "application/json-patch+json": patches.json_patch,
    "application/merge-patch+json": patches.merge_patch,
    "application/strategic-merge-patch+json": patches.strategic_patch,
}


class Decoded(Struct, frozen=True):
    """What a body says, and which of its fields we do not know."""

    object: Resource
    unknown: list[FieldProblem]


async def create(call: Call) -> Response:
    """Store a new object."""
    form = wanted_form(call.request)
    dry_run = is_dry_run(call.request)
    body = await read_document(call.request, call.context.settings)
    decoded = _decode(call, body)
    stored = await call.store.create(decoded.object, dry_run=dry_run)
    return answer(show(call, stored, form), 201, headers=warnings_header(decoded.unknown))


async def update(call: Call) -> Response:
    """Replace an object, or its status alone."""
    form = wanted_form(call.request)
    dry_run = is_dry_run(call.request)
    body = await read_document(call.request, call.context.settings)
    decoded = _decode(call, body)

    async def attempt(live: Resource) -> Resource:
        obj = _with_owners(decoded.object, live)
        if not obj.metadata.resource_version:
            obj = with_meta(obj, resource_version=live.metadata.resource_version)
        return await _write(call, obj, dry_run)

    is_unconditional = not decoded.object.metadata.resource_version
    stored = await _retried(call, attempt, attempts=_ATTEMPTS if is_unconditional else 1)
    return answer(show(call, stored, form), headers=warnings_header(decoded.unknown))


async def patch(call: Call) -> Response:
    """Change part of an object."""
    kind = media_type(call.request)
    if kind == _APPLY:
        return await apply(call)
    change = _patch_function(kind)
    form = wanted_form(call.request)
    dry_run = is_dry_run(call.request)
    body = parse(await read_body(call.request, call.context.settings))
    unknown: list[FieldProblem] = []

    async def attempt(live: Resource) -> Resource:
        patched = change(render(live), body)
        patches.check_version(live.metadata.resource_version, patched)
        decoded = _decode(call, patched)
        unknown[:] = decoded.unknown
        obj = _with_owners(decoded.object, live)
        version = live.metadata.resource_version
        return await _write(call, with_meta(obj, resource_version=version), dry_run)

    stored = await _retried(call, attempt)
    return answer(show(call, stored, form), headers=warnings_header(unknown))


async def apply(call: Call) -> Response:
    """Apply a manager's view of an object; make the object where it is missing."""
    form = wanted_form(call.request)
    dry_run = is_dry_run(call.request)
    manager = call.request.query_params.get("fieldManager", "")
    if not manager or len(manager) > 128 or not manager.isprintable():
        problem = FieldProblem("fieldManager", "is needed for apply: up to 128 characters")
        raise InvalidError(str(problem), problems=[problem])
    force = flag(call.request, "force")
    wanted = await read_document(call.request, call.context.settings)
    unknown = _decode(call, wanted).unknown  # what is wrong in itself is wrong before any merge

    async def make() -> Resource:
        merged = server_side.apply({}, wanted, manager=manager, owners={}, force=force)
        obj = _decode(call, {**merged.document, **_identity(wanted)}).object
        return await call.store.create(_owned(obj, merged.owners), dry_run=dry_run)

    async def attempt(live: Resource) -> Resource:
        owners = server_side.read_owners(live.metadata.annotations)
        patches.check_version(live.metadata.resource_version, wanted)
        merged = server_side.apply(
            render(live), wanted, manager=manager, owners=owners, force=force
        )
        obj = _owned(_decode(call, merged.document).object, merged.owners)
        version = live.metadata.resource_version
        return await _write(call, with_meta(obj, resource_version=version), dry_run)

    async def make_or_merge() -> tuple[Resource, int]:
        try:
            return await _retried(call, attempt), 200
        except NotFoundError:
            if call.target.subresource:
                raise
        try:
            return await make(), 201
        except AlreadyExistsError:
            # Another applier made it in between: this one is merged into what that one made.
            return await _retried(call, attempt), 200

    stored, code = await make_or_merge()
    return answer(show(call, stored, form), code, headers=warnings_header(unknown))


async def delete(call: Call) -> Response:
    """Delete one object; say whether it is gone or has yet to be finished with."""
    body = await read_document(call.request, call.context.settings)
    deleted = await _delete_one(call, call.target.name or "", delete_options(call.request, body))
    meta = deleted.metadata
    if meta.finalizers:
        return answer(render(deleted))
    return answer(success(call.target.info, meta.name, meta.uid))


async def delete_collection(call: Call) -> Response:
    """Delete every object that the selectors name."""
    body = await read_document(call.request, call.context.settings)
    options = delete_options(call.request, body)
    page = await read_page(call)
    deleted: list[dict[str, Any]] = []
    for obj in page.items:
        try:
            gone = await _delete_one(
                call, obj.metadata.name, options, namespace=obj.metadata.namespace
            )
        except NotFoundError:
            continue  # somebody else was faster, which is what was asked for
        deleted.append(render(gone))
    document = render_list(
        call.target.info, deleted, version=page.version, continue_token=page.continue_token
    )
    return answer(document)


async def _delete_one(
    call: Call, name: str, options: DeleteOptions, namespace: str | None = None
) -> Resource:
    cls = call.target.info.cls
    key = call.target.key._replace(name=name)
    if namespace is not None:
        key = key._replace(namespace=namespace)
    return await call.store.delete(
        cls,
        key,
        uid=options.uid,
        resource_version=options.resource_version,
        propagation=options.propagation,
        dry_run=options.is_dry_run,
    )


async def update_scale(call: Call) -> Response:
    """Write how many there are to be, and nothing else."""
    dry_run = is_dry_run(call.request)
    kind = media_type(call.request)
    is_patch = call.request.method == "PATCH"
    change = _patch_function(kind) if is_patch else None
    body = parse(await read_body(call.request, call.context.settings))
    info = call.target.info

    async def attempt(live: Resource) -> Resource:
        document = change(scale(live, info), body) if change else body
        patches.check_version(live.metadata.resource_version, document)
        replicas = _replicas(document)
        plain = patches.merge_patch(render(live), {"spec": {"replicas": replicas}})
        obj = _with_owners(_decode(call, plain).object, live)
        return await call.store.update(obj, dry_run=dry_run)

    return answer(scale(await _retried(call, attempt), info))


def _replicas(document: Any) -> int:
    spec = cast("dict[str, Any]", document).get("spec") if isinstance(document, dict) else None
    value = cast("dict[str, Any]", spec).get("replicas", 0) if isinstance(spec, dict) else None
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        problem = FieldProblem("spec.replicas", "must be a number, not negative")
        raise InvalidError(f"the scale is invalid: {problem}", problems=[problem])
    return value


def _patch_function(kind: str) -> Callable[[Any, Any], Any]:
    change = _PATCHES.get(kind)
    if change is None:
        known = ", ".join([*_PATCHES, _APPLY])
        raise UnsupportedMediaTypeError(
            f"patches of type {kind[:80]!r} are not read", hint=f"known types: {known}"
        )
    return change


async def _retried(
    call: Call, attempt: Callable[[Resource], Awaitable[Resource]], attempts: int = _ATTEMPTS
) -> Resource:
    """Read and write until nobody was faster. A conflict on the same version is no race."""
    version = ""
    while True:
        live = await call.store.get(call.target.info.cls, call.target.key)
        attempts -= 1
        try:
            return await attempt(live)
        except ConflictError:
            if attempts <= 0 or live.metadata.resource_version == version:
                raise
            version = live.metadata.resource_version


async def _write(call: Call, obj: Resource, dry_run: bool) -> Resource:
    if call.target.subresource == "status":
        return await call.store.update_status(obj, dry_run=dry_run)
    return await call.store.update(obj, dry_run=dry_run)


def _decode(call: Call, body: Any) -> Decoded:
    """Build the object that a body describes, and hold it against the path."""
    info, target = call.target.info, call.target
    if not isinstance(body, dict):
        raise BadRequestError("the body is an object with apiVersion, kind, metadata and spec")
    plain = cast("dict[str, Any]", body)
    for field, wanted in (("apiVersion", info.cls.API_VERSION), ("kind", info.kind)):
        if plain.get(field) not in (None, "", wanted):
            text = f"{str(plain[field])[:80]!r} does not belong here: use {wanted}"
            problem = FieldProblem(field, text)
            raise InvalidError(str(problem), problems=[problem])
    call.request.state.name = _said_name(plain)
    plain = _translated(info.cls, plain)
    unknown = codec.unknown_fields(info.cls, plain)
    if unknown and (policy := field_validation(call.request)) != "Ignore":
        if policy == "Strict":
            fields = ", ".join(f'unknown field "{problem.path}"' for problem in unknown)
            raise BadRequestError(f"strict decoding error: {fields}", problems=unknown)
    else:
        unknown = []
    obj = codec.from_builtins(info.cls, codec.without_nulls(info.cls, plain))
    meta = obj.metadata
    if target.name and meta.name not in ("", target.name):
        raise _mismatch("metadata.name", f"{meta.name[:80]!r} is not the name in the path")
    namespace = target.namespace or ""
    if meta.namespace not in ("", namespace):
        raise _mismatch("metadata.namespace", f"{meta.namespace[:80]!r} is not the path's")
    named = with_meta(obj, namespace=namespace, name=target.name or meta.name)
    return Decoded(codec.typed(named), unknown)


def _said_name(plain: dict[str, Any]) -> str:
    """Give the name that a body gives its object, also where nothing else in it can be read."""
    meta = plain.get("metadata")
    said = cast("dict[str, Any]", meta) if isinstance(meta, dict) else {}
    name = said.get("name") or said.get("generateName")
    return name[:253] if isinstance(name, str) else ""


def _translated(cls: type[Resource], plain: dict[str, Any]) -> dict[str, Any]:
    """Take what Kubernetes' own kinds have for writers' convenience, and we do not keep."""
    if cls is Namespace:
        return {name: value for name, value in plain.items() if name != "spec"}
    if cls is Secret and plain.get("type") == "":
        plain = {name: value for name, value in plain.items() if name != "type"}
    if cls is Secret and isinstance(texts := plain.get("stringData"), dict):
        data = plain.get("data")
        coded = {
            name: base64.b64encode(text.encode()).decode() if isinstance(text, str) else text
            for name, text in cast("dict[str, Any]", texts).items()
        }
        merged = {**(cast("dict[str, Any]", data) if isinstance(data, dict) else {}), **coded}
        rest = {name: value for name, value in plain.items() if name != "stringData"}
        return {**rest, "data": merged}
    return plain


def _mismatch(field: str, message: str) -> BadRequestError:
    problem = FieldProblem(field, message)
    return BadRequestError(str(problem), problems=[problem])


def _with_owners(obj: Resource, live: Resource) -> Resource:
    """Keep who owns which field: clients neither see nor send that annotation."""
    kept = live.metadata.annotations.get(server_side.ANNOTATION)
    annotations = {
        key: value
        for key, value in obj.metadata.annotations.items()
        if key != server_side.ANNOTATION
    }
    if kept is not None:
        annotations[server_side.ANNOTATION] = kept
    return with_meta(obj, annotations=annotations)


def _owned(obj: Resource, owners: server_side.Owners) -> Resource:
    text = server_side.write_owners(owners)
    annotations = {**obj.metadata.annotations, server_side.ANNOTATION: text}
    return structs.replace(obj, metadata=structs.replace(obj.metadata, annotations=annotations))


def _identity(wanted: dict[str, Any]) -> dict[str, Any]:
    return {name: wanted[name] for name in ("apiVersion", "kind") if name in wanted}
