"""Routing from method and path to the handler, the same for every kind."""

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from paddock.api.kube.context import KubeCall, KubeContext
from paddock.api.kube.requests import flag
from paddock.api.kube.scheme import ResourceTarget, parse_path
from paddock.api.kube.status import NotAllowedError
from paddock.api.kube.verbs import read, write
from paddock.api.kube.verbs.watch import watch
from paddock.kit.errors import NotFoundError

_VERBS: dict[Callable[[KubeCall], Awaitable[Response]], str] = {
    read.list_objects: "list",
    read.get: "get",
    read.get_scale: "get",
    watch: "watch",
    write.create: "create",
    write.update: "update",
    write.update_scale: "update",
    write.patch: "patch",
    write.delete: "delete",
    write.delete_collection: "deletecollection",
}
Handler = Callable[[KubeCall], Awaitable[Response]]

_COLLECTION: dict[str, Handler] = {
    "GET": read.list_objects,
    "POST": write.create,
    "DELETE": write.delete_collection,
}
_OBJECT: dict[str, Handler] = {
    "GET": read.get,
    "PUT": write.update,
    "PATCH": write.patch,
    "DELETE": write.delete,
}
_STATUS: dict[str, Handler] = {
    "GET": read.get,
    "PUT": write.update,
    "PATCH": write.patch,
}
_SCALE: dict[str, Handler] = {
    "GET": read.get_scale,
    "PUT": write.update_scale,
    "PATCH": write.update_scale,
}


def handlers_of(target: ResourceTarget) -> dict[str, Handler]:
    """Return the handlers of a target, by method."""
    if target.subresource == "scale":
        return _SCALE
    if target.subresource == "status":
        return _STATUS
    return _COLLECTION if target.name is None else _OBJECT


async def serve(context: KubeContext, request: Request) -> Response:
    """Serve a request for resources."""
    # The raw path: an encoded slash would be part of a name, and no name contains one.
    raw = request.scope.get("raw_path") or request.url.path.encode()
    path = request.url.path
    target = parse_path(path) if b"%2f" not in raw.lower() else None
    if target is None:
        raise NotFoundError(f"there is no resource at {path[:200]}", hint="kubectl api-resources")
    request.state.target = target
    method = "GET" if request.method == "HEAD" else request.method
    handler = handlers_of(target).get(method)
    if handler is write.create and target.info.cls.NAMESPACED and target.namespace is None:
        handler = None
    if handler is None:
        raise NotAllowedError(f"{request.method} is not allowed here")
    if handler in (read.list_objects, read.get) and flag(request, "watch"):
        handler = watch
    call = KubeCall(context, request, target)
    call.authorize("patch" if method == "PATCH" else _VERBS[handler])
    return await handler(call)
