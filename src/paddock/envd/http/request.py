"""One HTTP request and the means to answer it; what handlers see of HTTP.

The body arrives in pieces and is read by one reader; the answer leaves in pieces, as fast as the
client takes them. Parsing and sockets are `http`'s, behind the `RequestConnection` port.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import BinaryIO, Protocol
from urllib.parse import parse_qsl

_REASONS = {status.value: status.phrase for status in HTTPStatus}


class RequestConnection(Protocol):
    """The connection a request came by."""

    def body_consumed(self, body: "Body") -> None:
        """Know that there is room for more of the body."""
        ...

    def send_continue(self) -> None:
        """Invite the body."""
        ...

    def write(self, data: bytes) -> None:
        """Send bytes, buffering what the client does not take yet."""
        ...

    async def drained(self) -> None:
        """Wait until the client has taken enough."""
        ...

    async def send_file(self, file: BinaryIO, offset: int, count: int) -> None:
        """Send from a file to the socket without copying through this process."""
        ...

    def abort(self) -> None:
        """Cut the connection."""
        ...


class ClientGoneError(Exception):
    """The client closed the connection before the exchange was over."""


class BodyTooLargeError(Exception):
    """The body is longer than the reader wanted to hold."""


class HttpError(Exception):
    """An answer other than success, for the client to read."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Body:
    """A request body as it arrives; one reader."""

    def __init__(self, connection: RequestConnection) -> None:
        self._connection = connection
        self._chunks: deque[bytes] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._failure: Exception | None = None
        self.buffered = 0
        self.is_complete = False
        self.is_unwanted = False
        self.expects_continue = False

    def discard(self) -> None:
        """Nobody will read this: throw away what came and what comes."""
        self.is_unwanted = True
        self._chunks.clear()
        self.buffered = 0

    def feed(self, chunk: bytes) -> None:
        """Bytes came."""
        if self.is_unwanted:
            return
        self._chunks.append(chunk)
        self.buffered += len(chunk)
        self._wake()

    def finish(self) -> None:
        """Nothing more will come."""
        self.is_complete = True
        self._wake()

    def fail(self, failure: Exception) -> None:
        """The rest is lost."""
        self._failure = failure
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def chunk(self, patience: float | None = None) -> bytes:
        """Next piece, or `b""` at the end; `TimeoutError` where none comes for so many seconds."""
        while not self._chunks:
            if self.is_complete:
                return b""
            if self._failure is not None:
                raise self._failure
            if self.expects_continue:
                self.expects_continue = False
                self._connection.send_continue()
            self._waiter = asyncio.get_running_loop().create_future()
            async with asyncio.timeout(patience):
                await self._waiter
        piece = self._chunks.popleft()
        self.buffered -= len(piece)
        self._connection.body_consumed(self)
        return piece

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Pieces until the end."""
        while piece := await self.chunk():
            yield piece

    async def read(self, limit: int) -> bytes:
        """Read the whole body, if it is no longer than `limit`."""
        if self.is_complete and len(self._chunks) == 1 and self.buffered <= limit:
            return await self.chunk()
        pieces: list[bytes] = []
        size = 0
        async for piece in self:
            size += len(piece)
            if size > limit:
                raise BodyTooLargeError(f"the request body is larger than {limit} bytes")
            pieces.append(piece)
        return b"".join(pieces)


class HttpRequest:
    """One request and the means to answer it."""

    def __init__(self, connection: RequestConnection, method: str, target: bytes) -> None:
        path, _, query = target.partition(b"?")
        self.method = method
        self.path = path.decode("latin-1")
        self._query = query
        self._parsed_query: dict[str, str] | None = None
        self.headers: dict[str, str] = {}
        self.body = Body(connection)
        self.response_headers: list[tuple[str, str]] = []
        """Added to whatever the answer has (CORS)."""
        self.keep_alive = True
        self.is_http10 = False
        self.is_started = False
        self._connection = connection
        self._is_chunked = False
        self._head = b""

    @property
    def query(self) -> dict[str, str]:
        """Query parameters, the first of each name, with undecodable bytes kept."""
        if self._parsed_query is None:
            pairs = parse_qsl(
                self._query.decode("utf-8", "surrogateescape"),
                keep_blank_values=True,
                errors="surrogateescape",
                max_num_fields=64,
            )
            self._parsed_query = dict(reversed(pairs))
        return self._parsed_query

    def start(
        self, status: int, headers: list[tuple[str, str]], *, length: int | None = None
    ) -> None:
        """Send the head. Without `length` the body is chunked."""
        self.is_started = True
        lines = [f"HTTP/1.1 {status} {_REASONS.get(status, '')}"]
        lines += [f"{name}: {value}" for name, value in headers]
        lines += [f"{name}: {value}" for name, value in self.response_headers]
        if length is not None:
            if status >= 200 and status not in (204, 304):
                lines.append(f"Content-Length: {length}")
        elif self.is_http10:
            self.keep_alive = False
        else:
            self._is_chunked = True
            lines.append("Transfer-Encoding: chunked")
        if not self.keep_alive:
            lines.append("Connection: close")
        lines.append("\r\n")
        # Leaves together with the first of the body: a system call each would be half the cost.
        self._head = "\r\n".join(lines).encode("latin-1", "replace")

    async def write(self, data: bytes, *, is_last: bool = False) -> None:
        """Send a piece of the body; waits while the client is slow."""
        if self._is_chunked:
            end = b"0\r\n\r\n" if is_last else b""
            data = b"%b%x\r\n%b\r\n%b" % (self._take_head(), len(data), data, end)
        else:
            data = self._take_head() + data
        self._connection.write(data)
        await self._connection.drained()

    def _take_head(self) -> bytes:
        head, self._head = self._head, b""
        return head

    def respond(
        self, status: int, body: bytes = b"", *, headers: list[tuple[str, str]] | None = None
    ) -> None:
        """Send a whole answer."""
        self.start(status, headers or [], length=len(body))
        self._connection.write(self._take_head() + (b"" if self.method == "HEAD" else body))

    async def send_file(self, file: BinaryIO, offset: int, count: int) -> None:
        """Send part of a file from kernel to kernel; without a body, only the head."""
        self._connection.write(self._take_head())
        if count and self.method != "HEAD":
            await self._connection.send_file(file, offset, count)

    def abort(self) -> None:
        """Cut the connection, so that the client cannot mistake the answer for a whole one."""
        self._connection.abort()
