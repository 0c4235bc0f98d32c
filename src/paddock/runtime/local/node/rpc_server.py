"""The node's RPC server: accepts connections and dispatches requests to handlers."""

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Any

import msgspec
from msgspec import Struct

from paddock.kit.errors import InvalidError, PaddockError
from paddock.kit.logs import fields
from paddock.runtime.local.images.provider import ImageRequest
from paddock.runtime.local.node import rpc
from paddock.runtime.local.node.rpc import RpcConnection, RpcError, RpcReply, RpcRequest
from paddock.runtime.port import AgentConfig, Blueprint, EgressPolicy, RuntimeEvent

log = logging.getLogger(__name__)


class SnapshotArguments(Struct, frozen=True, kw_only=True):
    """Body of `snapshot`."""

    checkpoint_id: str
    memory: bool
    keep_running: bool


class LogArguments(Struct, frozen=True, kw_only=True):
    """Body of `logs`."""

    since: datetime | None = None
    limit: int = 1000


class FdResult(Struct, frozen=True):
    """A result that is a file descriptor; the server closes it after sending."""

    fd: int


BODIES: dict[str, Any] = {
    "create": Blueprint,
    "ensure_image": ImageRequest,
    "need_images": tuple[str, ...],
    "configure": AgentConfig,
    "snapshot": SnapshotArguments,
    "fork": tuple[Blueprint, ...],
    "set_egress": EgressPolicy,
    "logs": LogArguments,
}
"""Body types by method; all other methods have no body."""

Handler = Callable[[str, Any], Awaitable[object]]


class RpcServer:
    """Handles each request in its own task, so that a slow one delays no other."""

    def __init__(
        self,
        handlers: dict[str, Handler],
        spawn: Callable[[str, Any], None],
        abandon: Callable[[asyncio.Task[Any]], object],
    ) -> None:
        """`abandon` is called with the task of a request whose caller no longer waits."""
        self._handlers = handlers
        self._spawn = spawn
        self._abandon = abandon
        self._tasks: dict[tuple[RpcConnection, int], asyncio.Task[Any]] = {}
        self._watchers: set[tuple[RpcConnection, int]] = set()
        self._connections: set[RpcConnection] = set()
        self._listener: socket.socket | None = None

    def open(self, path: str) -> None:
        """Listen on a path."""
        self._listener = rpc.listen(path)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """Stop listening and close all connections."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None
        for connection in list(self._connections):
            connection.close()

    def publish(self, event: RuntimeEvent) -> None:
        """Send an event to all watchers."""
        result = msgspec.Raw(msgspec.msgpack.encode(event))
        for connection, ident in tuple(self._watchers):
            connection.send(RpcReply(id=ident, result=result))

    def _accept(self) -> None:
        if self._listener is None:
            return
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        if not rpc.is_peer_allowed(sock):
            log.warning("connection of another user refused")
            sock.close()
            return
        connection: RpcConnection | None = None

        def message(data: bytes, fds: list[int]) -> None:
            for fd in fds:  # no method takes descriptors
                os.close(fd)
            if connection is not None:
                self._on_message(connection, data)

        def closed() -> None:
            if connection is not None:
                self._on_close(connection)

        connection = RpcConnection(sock, on_message=message, on_close=closed)
        self._connections.add(connection)

    def _on_close(self, connection: RpcConnection) -> None:
        self._connections.discard(connection)
        self._watchers -= {w for w in self._watchers if w[0] is connection}
        for task in [task for (owner, _), task in self._tasks.items() if owner is connection]:
            self._abandon(task)

    def _on_message(self, connection: RpcConnection, data: bytes) -> None:
        try:
            request = msgspec.msgpack.decode(data, type=RpcRequest)
        except msgspec.DecodeError:
            connection.close()
            return
        if request.method == "watch":
            self._watchers.add((connection, request.id))
            connection.send(RpcReply(id=request.id))
            return
        if request.method == rpc.CANCEL:
            if (task := self._tasks.get((connection, request.id))) is not None:
                self._abandon(task)
            return
        self._spawn(f"{request.method} {request.uid}", self._handle(connection, request))

    async def _handle(self, connection: RpcConnection, request: RpcRequest) -> None:
        if (task := asyncio.current_task()) is not None:
            self._tasks[connection, request.id] = task
        try:
            await self._reply(connection, request)
        finally:
            self._tasks.pop((connection, request.id), None)

    async def _reply(self, connection: RpcConnection, request: RpcRequest) -> None:
        try:
            result = await self._dispatch(request)
        except PaddockError as problem:
            connection.send(RpcReply(id=request.id, problem=RpcError.of(problem)))
            return
        except Exception as problem:
            log.exception("request failed", extra=fields(method=request.method, uid=request.uid))
            inner = PaddockError(f"internal error of the node: {type(problem).__name__}: {problem}")
            connection.send(RpcReply(id=request.id, problem=RpcError.of(inner)))
            return
        if isinstance(result, FdResult):
            connection.send(RpcReply(id=request.id), [result.fd])
            os.close(result.fd)
        else:
            raw = msgspec.Raw(msgspec.msgpack.encode(result))
            connection.send(RpcReply(id=request.id, result=raw))

    async def _dispatch(self, request: RpcRequest) -> object:
        handler = self._handlers.get(request.method)
        if handler is None:
            raise InvalidError(f"unknown method {request.method!r}")
        kind = BODIES.get(request.method)
        try:
            body = msgspec.msgpack.decode(request.body, type=kind) if kind else None
        except msgspec.DecodeError as problem:
            raise InvalidError(f"the body of {request.method} is malformed: {problem}") from problem
        return await handler(request.uid, body)
