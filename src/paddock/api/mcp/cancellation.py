"""Cancels requests when their client asks for it: the notification is a request of its own."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec
from msgspec import Struct
from starlette.types import Message, Receive, Send

from paddock.api.mcp.http import McpClient

_CANCELLED = "notifications/cancelled"


class RpcHead(Struct, frozen=True):
    """What is read of a message of JSON-RPC."""

    method: str = ""
    id: str | int | None = None
    params: Mapping[str, Any] | None = None


def read_head(body: bytes) -> RpcHead:
    """Return the head of a message; an empty one if it is not valid: the protocol reports that."""
    try:
        return msgspec.json.decode(body, type=RpcHead)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return RpcHead()


class RunningRequests:
    """The requests in flight of this process, by client and id."""

    def __init__(self) -> None:
        self._scopes: dict[tuple[str, str, str | int], anyio.CancelScope] = {}

    def cancel(self, client: McpClient, head: RpcHead) -> None:
        """Cancel the request that a notification names, if it runs here."""
        wanted = (head.params or {}).get("requestId")
        if head.method != _CANCELLED or not isinstance(wanted, str | int):
            return
        scope = self._scopes.get((client.key_id, client.session_id, wanted))
        if scope is not None:
            scope.cancel()

    @asynccontextmanager
    async def cancellable(
        self, client: McpClient, head: RpcHead, send: Send
    ) -> AsyncGenerator[Send]:
        """Yield the `send` of a request, which may be cancelled meanwhile."""
        if head.id is None or not client.session_id:
            yield send
            return
        name = (client.key_id, client.session_id, head.id)
        progress = _Progress(send)
        with anyio.CancelScope() as scope:
            self._scopes[name] = scope
            try:
                yield progress
            finally:
                if self._scopes.get(name) is scope:
                    del self._scopes[name]
        if scope.cancelled_caught:
            await progress.finish()


class _Progress:
    """Sends, and knows how much of the response was sent."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._is_started = False
        self._is_complete = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._is_started = True
        elif not message.get("more_body", False):
            self._is_complete = True
        await self._send(message)

    async def finish(self) -> None:
        """End the response: nobody waits for it."""
        if not self._is_started:
            await self._send({"type": "http.response.start", "status": 202, "headers": []})
        if not self._is_complete:
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})


def replayed(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that begins with a body that was read before."""
    is_sent = False

    async def replay() -> Message:
        nonlocal is_sent
        if is_sent:
            return await receive()
        is_sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
