"""The node's RPC protocol: msgpack messages with file descriptors over a unix stream socket.

A frame is u32 size, u32 number of descriptors, then msgpack. A request has an id, a method, a uid
and a body; a reply repeats the id with a result or an error of `kit.errors`, by name. A watch gets
many replies. `cancel` repeats the id of a call whose caller no longer waits. Only root and the
node's own user may connect (`SO_PEERCRED`).
"""

import array
import asyncio
import collections
import contextlib
import errno
import os
import socket
import struct
from collections.abc import Callable, Sequence

import msgspec
from msgspec import Struct

from paddock.kit import errors
from paddock.kit.errors import PaddockError, UnavailableError

_FRAME = struct.Struct("<II")
_MAX_FRAME = 64 << 20
_MAX_FDS = 16
_READ = 256 * 1024
_MAX_UNSENT = 64 << 20
CANCEL = "cancel"

_ERRORS: dict[str, type[PaddockError]] = {
    kind.__name__: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, PaddockError)
}


class NodeLostError(UnavailableError):
    """The node is not running, or exited before it replied."""


class RpcRequest(Struct, frozen=True, kw_only=True):
    """One call of a method."""

    id: int
    method: str
    uid: str = ""
    body: msgspec.Raw = msgspec.Raw(b"\xc0")


class RpcError(Struct, frozen=True, kw_only=True):
    """An error as sent in a reply."""

    kind: str
    message: str
    hint: str | None = None
    retry_after_seconds: float | None = None

    @staticmethod
    def of(problem: PaddockError) -> "RpcError":
        """Encode an error by the nearest class of `kit.errors`."""
        known = (kind.__name__ for kind in type(problem).__mro__ if kind.__name__ in _ERRORS)
        return RpcError(
            kind=next(known),
            message=problem.message,
            hint=problem.hint,
            retry_after_seconds=getattr(problem, "retry_after_seconds", None),
        )

    def unpack(self) -> PaddockError:
        """Return the error to raise."""
        kind = _ERRORS.get(self.kind, PaddockError)
        problem = kind(self.message, hint=self.hint)
        if self.retry_after_seconds is not None:
            problem.__dict__["retry_after_seconds"] = self.retry_after_seconds
        return problem


class RpcReply(Struct, frozen=True, kw_only=True):
    """The result of a request, or its error."""

    id: int
    result: msgspec.Raw = msgspec.Raw(b"\xc0")
    problem: RpcError | None = None


class RpcConnection:
    """One end of a socket: sends and receives whole messages on the running loop."""

    def __init__(
        self,
        sock: socket.socket,
        *,
        on_message: Callable[[bytes, list[int]], None],
        on_close: Callable[[], None],
    ) -> None:
        self._sock = sock
        self._on_message = on_message
        self._on_close = on_close
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray()
        self._fds: collections.deque[int] = collections.deque()
        self._out: collections.deque[tuple[memoryview, list[int]]] = collections.deque()
        self._unsent = 0
        self.is_closed = False
        sock.setblocking(False)
        self._loop.add_reader(sock.fileno(), self._readable)

    def send(self, message: object, fds: Sequence[int] = ()) -> None:
        """Queue a message; the descriptors are duplicated at once."""
        if self.is_closed:
            return
        data = msgspec.msgpack.encode(message)
        frame = memoryview(_FRAME.pack(len(data), len(fds)) + data)
        self._unsent += len(frame)
        if self._unsent > _MAX_UNSENT:  # a watcher that does not read
            self.close()
            return
        self._out.append((frame, [os.dup(fd) for fd in fds]))
        if len(self._out) == 1:
            self._writable()

    def close(self) -> None:
        """Close the connection and drop unsent messages."""
        if self.is_closed:
            return
        self.is_closed = True
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        for _, fds in self._out:
            _close(fds)
        self._out.clear()
        _close(self._fds)
        self._fds.clear()
        self._on_close()

    def _writable(self) -> None:
        while self._out:
            frame, fds = self._out[0]
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            try:
                sent = self._sock.sendmsg([frame], rights, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                self._loop.add_writer(self._sock.fileno(), self._writable)
                return
            except OSError:
                self.close()
                return
            _close(fds)
            self._unsent -= sent
            if sent < len(frame):
                self._out[0] = (frame[sent:], [])
            else:
                self._out.popleft()
        self._loop.remove_writer(self._sock.fileno())

    def _readable(self) -> None:
        try:
            data, ancillary, _, _ = self._sock.recvmsg(
                _READ, socket.CMSG_SPACE(4 * _MAX_FDS), socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except OSError:
            self.close()
            return
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                got = array.array("i")
                got.frombytes(payload[: len(payload) - len(payload) % got.itemsize])
                self._fds.extend(got)
        if not data:
            self.close()
            return
        self._buffer += data
        self._deliver()

    def _deliver(self) -> None:
        while len(self._buffer) >= _FRAME.size and not self.is_closed:
            size, count = _FRAME.unpack_from(self._buffer)
            if size > _MAX_FRAME or count > _MAX_FDS:
                self.close()
                return
            end = _FRAME.size + size
            if len(self._buffer) < end:
                return
            if len(self._fds) < count:  # descriptors travel with a frame's first byte
                self.close()
                return
            message = bytes(self._buffer[_FRAME.size : end])
            del self._buffer[:end]
            self._on_message(message, [self._fds.popleft() for _ in range(count)])


class RpcClient:
    """The client: reconnects when needed; calls in flight fail when the node exits."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._connection: RpcConnection | None = None
        self._next = 0
        self._waiting: dict[int, asyncio.Future[tuple[RpcReply, list[int]]]] = {}
        self._streams: dict[int, asyncio.Queue[RpcReply | None]] = {}

    async def call(
        self, method: str, uid: str = "", body: object = None
    ) -> tuple[msgspec.Raw, list[int]]:
        """Call a method; return the result with its descriptors, or raise the node's error."""
        connection = self._connect()
        self._next += 1
        ident = self._next
        future: asyncio.Future[tuple[RpcReply, list[int]]] = (
            asyncio.get_running_loop().create_future()
        )
        self._waiting[ident] = future
        connection.send(_request(ident, method, uid, body))
        try:
            reply, fds = await future
        except asyncio.CancelledError:
            # What has not begun yet shall not run for nobody.
            connection.send(_request(ident, CANCEL, uid, None))
            raise
        finally:
            self._waiting.pop(ident, None)
        if reply.problem is not None:
            _close(fds)
            raise reply.problem.unpack()
        return reply.result, fds

    def stream(self, method: str) -> "asyncio.Queue[RpcReply | None]":
        """Start a call with many replies; `None` in the queue means that the node exited."""
        connection = self._connect()
        self._next += 1
        queue: asyncio.Queue[RpcReply | None] = asyncio.Queue()
        self._streams[self._next] = queue
        connection.send(_request(self._next, method, "", None))
        return queue

    def end_stream(self, queue: "asyncio.Queue[RpcReply | None]") -> None:
        """Forget a stream; its later replies are dropped."""
        for ident in [i for i, q in self._streams.items() if q is queue]:
            del self._streams[ident]

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()

    def _connect(self) -> RpcConnection:
        if self._connection is not None and not self._connection.is_closed:
            return self._connection
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(self._path)
        except OSError as problem:
            sock.close()
            raise NodeLostError(
                f"cannot connect to the node at {self._path}: {problem.strerror}",
                retry_after_seconds=0.5,
                hint="start the node with `paddock up`",
            ) from problem
        self._connection = RpcConnection(sock, on_message=self._on_message, on_close=self._on_lost)
        return self._connection

    def _on_message(self, data: bytes, fds: list[int]) -> None:
        reply = msgspec.msgpack.decode(data, type=RpcReply)
        if (queue := self._streams.get(reply.id)) is not None:
            queue.put_nowait(reply)
            return
        future = self._waiting.get(reply.id)
        if future is None or future.done():
            _close(fds)
            return
        future.set_result((reply, fds))

    def _on_lost(self) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(
                    NodeLostError(
                        "the node exited before it replied; the result of the call is unknown",
                        retry_after_seconds=0.5,
                    )
                )
        self._waiting.clear()
        for queue in self._streams.values():
            queue.put_nowait(None)
        self._streams.clear()


def _request(ident: int, method: str, uid: str, body: object) -> RpcRequest:
    return RpcRequest(
        id=ident, method=method, uid=uid, body=msgspec.Raw(msgspec.msgpack.encode(body))
    )


def is_peer_allowed(sock: socket.socket) -> bool:
    """Whether the peer is root or the node's own user."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", raw)
    return uid in (0, os.geteuid())


def listen(path: str) -> socket.socket:
    """Listen on a path, atomically replacing an old socket; only its owner may connect."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    # The mode of the socket's file is the mode of its inode at bind time.
    os.fchmod(sock.fileno(), 0o600)
    try:
        sock.bind(path)
    except OSError as problem:
        if problem.errno != errno.EADDRINUSE:
            raise
    else:
        sock.listen(1024)
        return sock
    temporary = f"{path}.{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    sock.bind(temporary)
    sock.listen(1024)
    os.rename(temporary, path)
    return sock


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
