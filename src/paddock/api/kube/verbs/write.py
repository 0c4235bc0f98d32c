"""Create, update, patch, apply and delete.

A patch is applied to the current object and written by compare-and-swap, with retries on conflict.
Nothing is written before the whole request is validated.
"""

from collections.abc import Awaitable, Callable
from typing import Any, cast

from starlette.responses import Response

from paddock.api.audit.notes import notes_of
from paddock.api.kube.body import apply as server_side
from paddock.api.kube.body import patches
from paddock.api.kube.body.decoding import decode
from paddock.api.kube.context import KubeCall, json_response, warnings_header
from paddock.api.kube.rendering import render, render_list, scale
from paddock.api.kube.requests import (
    DeleteOptions,
    delete_options,
    flag,
    is_dry_run,
    media_type,
    parse,
    read_body,
    read_document,
)
from paddock.api.kube.status import UnsupportedMediaTypeError, success_status
from paddock.api.kube.verbs.read import negotiate_form, read_page, render_form
from paddock.kit.errors import (
    AlreadyExistsError,
    ConflictError,
    FieldProblem,
    InvalidError,
    NotFoundError,
)
from paddock.resources.meta import Key, Resource, with_meta

_ATTEMPTS = 64
"""How often a patch is retried after a conflict before the client gets the error."""
_APPLY = "application/apply-patch+yaml"
_PATCHES: dict[str, Callable[[Any, Any], Any]] = {
    "application/json-patch+json": patches.json_patch,
    "application/merge-patch+json": patches.merge_patch,
    "application/strategic-merge-patch+json": patches.strategic_patch,
}


async def create(call: KubeCall) -> Response:
    """Create an object."""
    form = negotiate_form(call.request)
    dry_run = is_dry_run(call.request)
    body = await read_document(call.request, call.context.settings)
    decoded = decode(call, body)
    stored = await _create(call, decoded.object, dry_run)
    notes_of(call.request.scope).name = stored.metadata.name
    return json_response(
        render_form(call, stored, form), 201, headers=warnings_header(decoded.unknown)
    )


async def update(call: KubeCall) -> Response:
    """Replace an object, or only its status."""
    form = negotiate_form(call.request)
    dry_run = is_dry_run(call.request)
    body = await read_document(call.request, call.context.settings)
    decoded = decode(call, body)

    async def attempt(live: Resource) -> Resource:
        obj = server_side.keep_owners(decoded.object, live)
        if not obj.metadata.resource_version:
            obj = with_meta(obj, resource_version=live.metadata.resource_version)
        return await _write(call, live, obj, dry_run)

    is_unconditional = not decoded.object.metadata.resource_version
    stored = await _retry_on_conflict(call, attempt, attempts=_ATTEMPTS if is_unconditional else 1)
    return json_response(render_form(call, stored, form), headers=warnings_header(decoded.unknown))


async def patch(call: KubeCall) -> Response:
    """Change part of an object."""
    kind = media_type(call.request)
    if kind == _APPLY:
        return await apply(call)
    change = _patch_function(kind)
    form = negotiate_form(call.request)
    dry_run = is_dry_run(call.request)
    body = parse(await read_body(call.request, call.context.settings))
    unknown: list[FieldProblem] = []

    async def attempt(live: Resource) -> Resource:
        patched = change(render(live), body)
        patches.check_version(live.metadata.resource_version, patched)
        decoded = decode(call, patched)
        unknown[:] = decoded.unknown
        obj = server_side.keep_owners(decoded.object, live)
        version = live.metadata.resource_version
        return await _write(call, live, with_meta(obj, resource_version=version), dry_run)

    stored = await _retry_on_conflict(call, attempt)
    return json_response(render_form(call, stored, form), headers=warnings_header(unknown))


async def apply(call: KubeCall) -> Response:
    """Server-side apply; create the object if it does not exist."""
    form = negotiate_form(call.request)
    dry_run = is_dry_run(call.request)
    manager = call.request.query_params.get("fieldManager", "")
    if not manager or len(manager) > 128 or not manager.isprintable():
        problem = FieldProblem("fieldManager", "is needed for apply: up to 128 characters")
        raise InvalidError(str(problem), problems=[problem])
    force = flag(call.request, "force")
    wanted = await read_document(call.request, call.context.settings)
    unknown = decode(call, wanted).unknown  # reject invalid bodies before any merge

    async def make() -> Resource:
        merged = server_side.apply({}, wanted, manager=manager, owners={}, force=force)
        obj = decode(call, {**merged.document, **_identity(wanted)}).object
        return await _create(call, obj, dry_run, owners=merged.owners)

    async def attempt(live: Resource) -> Resource:
        owners = server_side.read_owners(live.metadata.annotations)
        patches.check_version(live.metadata.resource_version, wanted)
        merged = server_side.apply(
            render(live), wanted, manager=manager, owners=owners, force=force
        )
        obj = server_side.keep_owners(decode(call, merged.document).object, live)
        versioned = with_meta(obj, resource_version=live.metadata.resource_version)
        return await _write(call, live, versioned, dry_run, owners=merged.owners)

    async def make_or_merge() -> tuple[Resource, int]:
        try:
            return await _retry_on_conflict(call, attempt), 200
        except NotFoundError:
            if call.target.subresource:
                raise
        call.authorize("create")
        try:
            return await make(), 201
        except AlreadyExistsError:
            # Created concurrently: merge into that object.
            return await _retry_on_conflict(call, attempt), 200

    stored, code = await make_or_merge()
    return json_response(render_form(call, stored, form), code, headers=warnings_header(unknown))


async def delete(call: KubeCall) -> Response:
    """Delete one object; return a `Status`, or the object if finalizers remain."""
    body = await read_document(call.request, call.context.settings)
    deleted = await _delete_one(call, call.target.name or "", delete_options(call.request, body))
    meta = deleted.metadata
    if meta.finalizers:
        return json_response(render(deleted))
    return json_response(success_status(call.target.info, meta.name, meta.uid))


async def delete_collection(call: KubeCall) -> Response:
    """Delete every object that the selectors match."""
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
            continue  # already deleted by another request
        deleted.append(render(gone))
    document = render_list(
        call.target.info, deleted, version=page.version, continue_token=page.continue_token
    )
    return json_response(document)


async def _delete_one(
    call: KubeCall, name: str, options: DeleteOptions, namespace: str | None = None
) -> Resource:
    key = call.target.key._replace(name=name)
    if namespace is not None:
        key = key._replace(namespace=namespace)
    if call.owner_term is None:
        return await _delete_version(call, key, options, options.resource_version)

    async def attempt(live: Resource) -> Resource:
        # The version that was read: a recycled sandbox may become another team's any moment.
        version = options.resource_version or live.metadata.resource_version
        return await _delete_version(call, key, options, version)

    return await _retry_on_conflict(call, attempt, key=key)


async def _delete_version(
    call: KubeCall, key: Key, options: DeleteOptions, version: str | None
) -> Resource:
    return await call.store.delete(
        call.target.info.cls,
        key,
        uid=options.uid,
        resource_version=version,
        propagation=options.propagation,
        dry_run=options.is_dry_run,
    )


async def update_scale(call: KubeCall) -> Response:
    """Update the replica count, and nothing else."""
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
        obj = server_side.keep_owners(decode(call, plain).object, live)
        obj = await call.admitted(live, obj)
        async with call.writing(live, obj, dry_run=dry_run):
            return await call.store.update(obj, dry_run=dry_run)

    return json_response(scale(await _retry_on_conflict(call, attempt), info))


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
            f"patches of type {kind[:80]!r} are not supported", hint=f"known types: {known}"
        )
    return change


async def _retry_on_conflict(
    call: KubeCall,
    attempt: Callable[[Resource], Awaitable[Resource]],
    attempts: int = _ATTEMPTS,
    key: Key | None = None,
) -> Resource:
    """Read and write, with retries on conflict. A second conflict on the same version is final."""
    version = ""
    while True:
        live = await call.read(key or call.target.key)
        attempts -= 1
        try:
            return await attempt(live)
        except ConflictError:
            if attempts <= 0 or live.metadata.resource_version == version:
                raise
            version = live.metadata.resource_version


async def _create(
    call: KubeCall, obj: Resource, dry_run: bool, *, owners: server_side.Owners | None = None
) -> Resource:
    obj = await call.admitted(None, obj)
    call.check(None, obj)
    if owners is not None:
        obj = server_side.with_owners(obj, owners)
    async with call.writing(None, obj, dry_run=dry_run):
        return await call.store.create(obj, dry_run=dry_run)


async def _write(
    call: KubeCall,
    live: Resource,
    obj: Resource,
    dry_run: bool,
    *,
    owners: server_side.Owners | None = None,
) -> Resource:
    obj = await call.admitted(live, obj)
    call.check(live, obj)
    if owners is not None:
        obj = server_side.with_owners(obj, owners)
    if call.target.subresource == "status":
        return await call.store.update_status(obj, dry_run=dry_run)
    async with call.writing(live, obj, dry_run=dry_run):
        return await call.store.update(obj, dry_run=dry_run)


def _identity(wanted: dict[str, Any]) -> dict[str, Any]:
    return {name: wanted[name] for name in ("apiVersion", "kind") if name in wanted}
