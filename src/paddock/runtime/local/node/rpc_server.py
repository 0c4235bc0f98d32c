"""The node's door: which method does what, for whoever may connect."""

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
from paddock.runtime.local.node import rpc
from paddock.runtime.local.node.rpc import Answer, Connection, Problem, Request
from paddock.runtime.port import AgentConfig, Blueprint, EgressPolicy, RuntimeEvent

log = logging.getLogger(__name__)


class SnapshotArguments(Struct, frozen=True, kw_only=True):
    """What to store."""

    checkpoint_id: str
    memory: bool
    keep_running: bool


class LogArguments(Struct, frozen=True, kw_only=True):
    """Which lines are wanted."""

    since: datetime | None = None
    limit: int = 1000


class Descriptor(Struct, frozen=True):
    """A result that is a file descriptor, sent along and then closed here."""

    fd: int


BODIES: dict[str, Any] = {
    "create": Blueprint,
    "configure": AgentConfig,
    "snapshot": SnapshotArguments,
    "fork": tuple[Blueprint, ...],
    "set_egress": EgressPolicy,
    "logs": LogArguments,
}
"""What the body of a method is; all others have none."""

Handler = Callable[[str, Any], Awaitable[object]]


class Service:
    """Answers requests; each in a task of its own, so that a slow one holds nobody up."""

    def __init__(
        self,
        handlers: dict[str, Handler],
        spawn: Callable[[str, Any], None],
    ) -> None:
        self._handlers = handlers
        self._spawn = spawn
        self._watchers: set[tuple[Connection, int]] = set()
        self._connections: set[Connection] = set()
        self._listener: socket.socket | None = None

    def open(self, path: str) -> None:
        """Listen."""
        self._listener = rpc.listen(path)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """Hang up on everybody."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None
        for connection in list(self._connections):
            connection.close()

    def tell(self, event: RuntimeEvent) -> None:
        """Send an event to all watchers."""
        result = msgspec.Raw(msgspec.msgpack.encode(event))
        for connection, ident in tuple(self._watchers):
            connection.send(Answer(id=ident, result=result))

    def _accept(self) -> None:
        if self._listener is None:
            return
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        if not rpc.may_connect(sock):
            log.warning("stranger refused")
            sock.close()
            return
        connection: Connection | None = None

        def message(data: bytes, fds: list[int]) -> None:
            for fd in fds:  # nothing is ever sent to us
                os.close(fd)
            if connection is not None:
                self._message(connection, data)

        def closed() -> None:
            if connection is not None:
                self._connections.discard(connection)
                self._watchers -= {w for w in self._watchers if w[0] is connection}

        connection = Connection(sock, on_message=message, on_close=closed)
        self._connections.add(connection)

    def _message(self, connection: Connection, data: bytes) -> None:
        try:
            request = msgspec.msgpack.decode(data, type=Request)
        except msgspec.DecodeError:
            connection.close()
            return
        if request.method == "watch":
            self._watchers.add((connection, request.id))
            connection.send(Answer(id=request.id))
            return
        self._spawn(f"{request.method} {request.uid}", self._answer(connection, request))

    async def _answer(self, connection: Connection, request: Request) -> None:
        try:
            result = await self._perform(request)
        except PaddockError as problem:
            connection.send(Answer(id=request.id, problem=Problem.of(problem)))
            return
        except Exception as problem:
            log.exception("request failed", extra=fields(method=request.method, uid=request.uid))
            inner = PaddockError(f"the node failed: {type(problem).__name__}: {problem}")
            connection.send(Answer(id=request.id, problem=Problem.of(inner)))
            return
        if isinstance(result, Descriptor):
            connection.send(Answer(id=request.id), [result.fd])
            os.close(result.fd)
        else:
            raw = msgspec.Raw(msgspec.msgpack.encode(result))
            connection.send(Answer(id=request.id, result=raw))

    async def _perform(self, request: Request) -> object:
        handler = self._handlers.get(request.method)
        if handler is None:
            raise InvalidError(f"the node has no method {request.method!r}")
        kind = BODIES.get(request.method)
        try:
            body = msgspec.msgpack.decode(request.body, type=kind) if kind else None
        except msgspec.DecodeError as problem:
            raise InvalidError(f"the body of {request.method} is malformed: {problem}") from problem
        return await handler(request.uid, body)
