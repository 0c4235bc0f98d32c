"""Request ids: each request has one, which the response and the audit log contain."""

import re

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paddock.kit import ids

_GIVEN = b"x-request-id"
_REQUEST_ID = re.compile(rb"^[\x21-\x7e]{1,128}$")


class RequestIds:
    """Assigns every request an id, or keeps the client's, and returns it in the response."""

    def __init__(self, app: ASGIApp, header: bytes = b"x-request-id") -> None:
        """`header` is the header of the response."""
        self._app = app
        self._header = header

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or "request_id" in scope.get("state", ()):
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(_GIVEN, b"")
        request_id = given if _REQUEST_ID.match(given) else ids.request_id().encode()
        scope.setdefault("state", {})["request_id"] = request_id.decode("latin-1")

        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (self._header, request_id)]
            await send(message)

        await self._app(scope, receive, with_id)
