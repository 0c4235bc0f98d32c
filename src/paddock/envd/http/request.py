"""One HTTP request and its response, as handlers see them.

The body arrives in chunks and has one reader. The response leaves in chunks, as fast as the client
takes them. Parsing and sockets are in `server.py`, behind the `RequestConnection` port.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import BinaryIO, Protocol
from urllib.parse import parse_qsl

_REASONS = {status.value: status.phrase for status in HTTPStatus}


class RequestConnection(Protocol):
    """The connection that a request arrived on."""

    def body_consumed(self, body: "Body") -> None:
        """Resume reading: the handler has consumed part of the body."""
        ...

    def send_continue(self) -> None:
        """Send `100 Continue`."""
        ...

    def write(self, data: bytes) -> None:
        """Send bytes; buffer those that the client does not take yet."""
        ...

    async def drained(self) -> None:
        """Wait until the write buffer is below its high-water mark."""
        ...

    async def send_file(self, file: BinaryIO, offset: int, count: int) -> None:
        """Send part of a file with sendfile, without copying through this process."""
        ...

    def abort(self) -> None:
        """Reset the connection."""
        ...


class ClientGoneError(Exception):
    """The client closed the connection before the response was complete."""


class BodyTooLargeError(Exception):
    """The body is longer than the reader's limit."""


class HttpError(Exception):
    """An error response; the message is sent to the client."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Body:
    """A request body as it arrives; has one reader."""

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
        """Discard what has arrived and what is still to come."""
        self.is_unwanted = True
        self._chunks.clear()
        self.buffered = 0

    def feed(self, chunk: bytes) -> None:
        """Append a chunk that arrived."""
        if self.is_unwanted:
            return
        self._chunks.append(chunk)
        self.buffered += len(chunk)
        self._wake()

    def finish(self) -> None:
        """Mark the body as complete."""
        self.is_complete = True
        self._wake()

    def fail(self, failure: Exception) -> None:
        """Make the reader raise `failure` after the chunks that arrived."""
        self._failure = failure
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def chunk(self, timeout: float | None = None) -> bytes:
        """Return the next chunk, or `b""` at the end; `TimeoutError` after `timeout` seconds."""
        while not self._chunks:
            if self.is_complete:
                return b""
            if self._failure is not None:
                raise self._failure
            if self.expects_continue:
                self.expects_continue = False
                self._connection.send_continue()
            self._waiter = asyncio.get_running_loop().create_future()
            async with asyncio.timeout(timeout):
                await self._waiter
        piece = self._chunks.popleft()
        self.buffered -= len(piece)
        self._connection.body_consumed(self)
        return piece

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while piece := await self.chunk():
            yield piece

    async def read(self, limit: int) -> bytes:
        """Return the whole body, or raise `BodyTooLargeError` above `limit` bytes."""
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
    """One request, with the methods that send its response."""

    def __init__(self, connection: RequestConnection, method: str, target: bytes) -> None:
        path, _, query = target.partition(b"?")
        self.method = method
        self.path = path.decode("latin-1")
        self._query = query
        self._parsed_query: dict[str, str] | None = None
        self.headers: dict[str, str] = {}
        self.body = Body(connection)
        self.response_headers: list[tuple[str, str]] = []
        """Headers added to every response (CORS)."""
        self.keep_alive = True
        self.is_http10 = False
        self.is_started = False
        self._connection = connection
        self._is_chunked = False
        self._head = b""

    @property
    def query(self) -> dict[str, str]:
        """The query parameters: the first of each name; undecodable bytes as surrogates."""
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
        """Prepare the response head. Without `length` the body is chunked."""
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
        # Sent together with the first bytes of the body, which saves half of the system calls.
        self._head = "\r\n".join(lines).encode("latin-1", "replace")

    async def write(self, data: bytes, *, is_last: bool = False) -> None:
        """Send part of the body; wait while the client is slow."""
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
        """Send a complete response."""
        self.start(status, headers or [], length=len(body))
        self._connection.write(self._take_head() + (b"" if self.method == "HEAD" else body))

    async def send_file(self, file: BinaryIO, offset: int, count: int) -> None:
        """Send part of a file as the body; for HEAD requests send the head only."""
        self._connection.write(self._take_head())
        if count and self.method != "HEAD":
            await self._connection.send_file(file, offset, count)

    def abort(self) -> None:
        """Reset the connection, so that the client does not take the response for complete."""
        self._connection.abort()
