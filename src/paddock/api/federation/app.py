"""The signed API between control planes of several clusters.

`create_app` serves peers. `FederationProxy` wraps E2B's API: it forwards calls about sandboxes of
another cluster, which their ids name, and merges the lists of all clusters.
"""

import re
from collections.abc import Awaitable, Callable
from functools import partial

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paddock.api import bodies
from paddock.api.audit.e2b_calls import CALLS, call_of_sandbox
from paddock.api.audit.notes import CALLER, notes_of
from paddock.api.e2b import query
from paddock.api.e2b.context import authenticate
from paddock.api.errors import retry_after, status_of
from paddock.api.federation import lists
from paddock.api.internal import ERROR_HANDLERS
from paddock.api.login_limits import LoginLimits
from paddock.claims.caller import Caller, Role
from paddock.kit.errors import NotFoundError, PaddockError
from paddock.manager.environments.queue import ClaimQueue
from paddock.manager.federation.protocol import (
    GATEWAY,
    PREFIX,
    SIGNATURE,
    AbandonedClaim,
    ForwardedCall,
    ForwardedClaim,
    ForwardedReply,
    Signer,
)
from paddock.manager.federation.service import Federation
from paddock.manager.keys import Keyring
from paddock.manager.service import Manager
from paddock.resources import codec

Application = ASGIApp
MAX_BODY_BYTES = 1 << 20
MAX_MESSAGE_BYTES = 2 << 20
"""Limit of a message to a peer, which contains a body of `MAX_BODY_BYTES` in base64."""
CALL_SECONDS = 75.0
_KEPT_HEADERS = frozenset(
    name.encode() for name in ("content-type", "retry-after", lists.NEXT, lists.RUNNING)
)
_SANDBOX_PATH = re.compile(
    r"^(?:/kruise/api)?(?:/v[0-9]+)?/sandboxes/([a-z0-9]+)(?:-[a-z0-9]+)?(?:/|$)"
)
_LIST_PATH = re.compile(r"^(?:/kruise/api)?(?:/v2)?/sandboxes$")


def create_app(
    federation: Federation,
    signer: Signer,
    manager: Manager,
    claim_queue: ClaimQueue,
    e2b: ASGIApp,
) -> Starlette:
    """Return the application that serves other control planes."""

    async def read_verified(request: Request) -> bytes:
        # Unauthenticated senders can reach this, and the signature covers the whole body.
        body = await bodies.read_limited(request, MAX_MESSAGE_BYTES)
        signer.check(request.headers.get(SIGNATURE, ""), request.method, request.url.path, body)
        return body

    async def snapshot(request: Request) -> Response:
        await read_verified(request)
        return _json(msgspec.json.encode(federation.announcement(claim_queue)))

    async def claim(request: Request) -> Response:
        wanted = msgspec.json.decode(await read_verified(request), type=ForwardedClaim)
        # The other control plane has checked the scopes.
        caller = request.scope[CALLER] = Caller(wanted.team, wanted.key_id, wanted.role)
        admitted = federation.admit(wanted)
        sandbox = await manager.claims.create(caller, admitted)
        notes_of(request.scope).created = (admitted.sandbox_id,)
        if federation.is_abandoned(admitted.sandbox_id):
            await manager.lifecycle.kill(caller, admitted.sandbox_id)
            raise NotFoundError("the caller has given up on this claim")
        return _json(codec.encode(sandbox), {GATEWAY: federation.gateway})

    async def abandon(request: Request) -> Response:
        wanted = msgspec.json.decode(await read_verified(request), type=AbandonedClaim)
        notes_of(request.scope).name = wanted.sandbox_id
        federation.abandon(wanted.sandbox_id)
        sandbox = manager.queries.find_by_id(wanted.sandbox_id)
        if sandbox is not None and sandbox.spec.claim is not None:
            caller = request.scope[CALLER] = Caller(sandbox.spec.claim.owner, "", Role.MEMBER)
            await manager.lifecycle.kill(caller, wanted.sandbox_id)
        return Response(status_code=204)

    async def lookup(request: Request) -> Response:
        await read_verified(request)
        sandbox = manager.queries.find_by_id(request.path_params["id"])
        if sandbox is None:
            raise NotFoundError("the sandbox was not found")
        return _json(codec.encode(sandbox), {GATEWAY: federation.gateway})

    async def call(request: Request) -> Response:
        wanted = msgspec.json.decode(await read_verified(request), type=ForwardedCall)
        caller = Caller(wanted.team, wanted.key_id, wanted.role, wanted.scopes)
        return _json(msgspec.json.encode(await _call_e2b(e2b, wanted, caller)))

    return Starlette(
        routes=[
            Route(f"{PREFIX}/snapshot", snapshot, methods=["GET"]),
            Route(f"{PREFIX}/claims", claim, methods=["POST"]),
            Route(f"{PREFIX}/abandon", abandon, methods=["POST"]),
            Route(f"{PREFIX}/sandboxes/{{id}}", lookup, methods=["GET"]),
            Route(f"{PREFIX}/calls", call, methods=["POST"]),
        ],
        exception_handlers=ERROR_HANDLERS,
    )


def _json(body: bytes, headers: dict[str, str] | None = None) -> Response:
    return Response(body, 200, headers, media_type="application/json")


async def _call_e2b(e2b: ASGIApp, call: ForwardedCall, caller: Caller) -> ForwardedReply:
    """Call the local E2B API for a caller that the other control plane authenticated."""
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": call.method,
        "scheme": "http",
        "path": call.path,
        "raw_path": call.path.encode(),
        "query_string": call.query.encode(),
        "root_path": "",
        "headers": [(b"content-type", b"application/json")],
        "client": None,
        "server": None,
        CALLER: caller,
    }
    status, headers, body = 500, dict[str, str](), bytearray()

    async def receive() -> Message:
        return {"type": "http.request", "body": call.body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
            headers.update(
                (name.decode("latin-1"), value.decode("latin-1"))
                for name, value in message.get("headers", ())
                if name in _KEPT_HEADERS
            )
        elif message["type"] == "http.response.body":
            body.extend(message.get("body", b""))

    await e2b(scope, receive, send)
    return ForwardedReply(status=status, body=bytes(body), headers=headers)


class FederationProxy:
    """Serves sandboxes of all clusters; passes other calls to the local E2B API."""

    def __init__(
        self, e2b: ASGIApp, federation: Federation, keyring: Keyring, logins: LoginLimits
    ) -> None:
        self._e2b = e2b
        self._federation = federation
        self._keyring = keyring
        self._logins = logins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        work = self._handler_for(scope) if scope["type"] == "http" else None
        if work is None:
            await self._e2b(scope, receive, send)
            return
        try:
            response = await work(Request(scope, receive))
        except PaddockError as error:
            notes_of(scope).fail(error)
            shown = {"code": status_of(error), "message": error.message}
            wait = retry_after(error)
            headers = {"retry-after": str(int(wait))} if wait is not None else None
            response = Response(
                msgspec.json.encode(shown), status_of(error), headers, "application/json"
            )
        await response(scope, receive, send)

    def _handler_for(self, scope: Scope) -> Callable[[Request], Awaitable[Response]] | None:
        if scope["method"] == "GET" and _LIST_PATH.match(scope["path"]):
            return self._list
        match = _SANDBOX_PATH.match(scope["path"])
        if match is None or self._federation.owner_cluster(match[1]) is None:
            return None
        return partial(self._forward, sandbox_id=match[1])

    async def _list(self, request: Request) -> Response:
        notes_of(request.scope).call = CALLS[("GET", "/sandboxes")]
        caller = authenticate(request, self._keyring, self._logins)
        call = _call(request, caller, b"")
        here = await _call_e2b(self._e2b, call, caller)
        if here.status != 200:
            return _to_response(here)
        there, missing = await self._federation.forward_to_all(call)
        heard = {name: reply for name, reply in there.items() if reply.status == 200}
        limit, ascending, options = None, False, request.query_params
        if request.url.path.endswith("/v2/sandboxes"):
            most = query.MAX_LIMIT
            limit = query.number(options, "limit", default=most, low=1, high=most)
            ascending = query.is_ascending(options)
        silent = (*missing, *(there.keys() - heard.keys()))
        reply = lists.merge((here, *heard.values()), silent, limit=limit, ascending=ascending)
        return _to_response(reply)

    async def _forward(self, request: Request, *, sandbox_id: str) -> Response:
        notes = notes_of(request.scope)
        notes.call, notes.name = call_of_sandbox(request.method, request.url.path), sandbox_id
        caller = authenticate(request, self._keyring, self._logins)
        call = _call(request, caller, await bodies.read_limited(request, MAX_BODY_BYTES))
        reply = await self._federation.forward(sandbox_id, call, timeout_seconds=CALL_SECONDS)
        return _to_response(reply)


def _call(request: Request, caller: Caller, body: bytes) -> ForwardedCall:
    return ForwardedCall(
        team=caller.team,
        role=caller.role,
        scopes=caller.scopes,
        key_id=caller.key_id if caller.scopes else "",
        method=request.method,
        path=request.url.path,
        query=request.url.query,
        body=body,
    )


def _to_response(reply: ForwardedReply) -> Response:
    return Response(reply.body, reply.status, dict(reply.headers))
