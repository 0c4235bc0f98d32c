"""One request and its response, between a client's connection and an upstream one.

Bytes are relayed as they arrive; backpressure on one side pauses the other. A request is sent
upstream exactly once: it is bound to one upstream connection and never repeated on another, except
for a safe request on a reused connection that had just closed. The two sides are defined in
`protocols`.
"""

from msgspec import Struct

from paddock.gateway.activity import SandboxTraffic
from paddock.gateway.http.bodies import chunk, last_chunk
from paddock.gateway.http.error_responses import error_response
from paddock.gateway.http.protocols import ClientSide, ExchangeObserver, PauseReason, UpstreamSide
from paddock.gateway.http.request_heads import RequestHead
from paddock.gateway.http.response_heads import ResponseHead, write_response
from paddock.gateway.routing.routes import Route

MAX_PENDING_BYTES = 64 * 1024
"""How much of a body is buffered before there is an upstream."""
_NO_COPY_BYTES = 8 * 1024
_SAFE = frozenset(("GET", "HEAD", "OPTIONS"))


class Exchange(Struct, eq=False):
    """One request and its response. (A struct, since one is created per request.)"""

    client: ClientSide
    head: RequestHead
    started: float
    observer: ExchangeObserver
    is_request_done: bool = False
    upstream: UpstreamSide | None = None
    response: ResponseHead | None = None
    is_over: bool = False
    is_tunnel: bool = False
    is_reusing: bool = False
    """Whether the upstream connection served other requests before."""
    has_client_ended: bool = False
    has_upstream_ended: bool = False
    status: int = 0
    request_bytes: int = 0
    response_bytes: int = 0
    sandbox_id: str | None = None
    port: int | None = None
    route: Route | None = None
    traffic: SandboxTraffic | None = None
    sent: bytes = b""
    """The head as it was forwarded."""
    task: object | None = None
    """The task that must finish before the request can be forwarded; cancelled with the
    exchange."""
    held_bytes: int = 0
    pending: list[bytes] | None = None
    """Body bytes received before there was an upstream."""
    rechunks: bool = False
    prefix: str | None = None
    """The part of the API's origin that belongs to the sandbox, perhaps empty. None: the response
    is not for a browser, or its origin is the sandbox's own."""

    # ---- from the client -----------------------------------------------------------------

    def body(self, data: bytes) -> None:
        """Forward or buffer a piece of the request's body."""
        self.request_bytes += len(data)
        upstream = self.upstream
        if upstream is not None:
            if not self.head.framing.is_chunked:
                upstream.write(data)
            elif len(data) > _NO_COPY_BYTES:
                upstream.write_all((b"%x\r\n" % len(data), data, b"\r\n"))
            else:
                upstream.write(chunk(data))
        elif not self.is_over:
            self._hold(chunk(data) if self.head.framing.is_chunked else data)

    def request_end(self, trailers: list[bytes]) -> None:
        """Handle the end of the request's body."""
        self.is_request_done = True
        if self.head.framing.is_chunked:
            end = last_chunk(trailers)
            if self.upstream is not None:
                self.upstream.write(end)
            elif not self.is_over:
                self._hold(end)

    def _hold(self, data: bytes) -> None:
        if self.pending is None:
            self.pending = []
        self.pending.append(data)
        self.held_bytes += len(data)
        if self.held_bytes > MAX_PENDING_BYTES:
            self.client.pause(PauseReason.HELD)

    def take_pending(self) -> bytes:
        """Return the buffered body bytes, and resume reading from the client."""
        pending = b"".join(self.pending or ())
        self.pending = None
        self.held_bytes = 0
        self.client.resume(PauseReason.HELD)
        return pending

    def client_eof(self) -> None:
        """Handle end-of-file from the client of a tunnel."""
        self.has_client_ended = True
        upstream = self.upstream
        if upstream is not None:
            upstream.write_eof()
            self._close_if_both_ended()

    # ---- from the sandbox ----------------------------------------------------------------

    def interim_response(self, response: ResponseHead) -> None:
        """Relay a 1xx response to a client that speaks HTTP/1.1."""
        if self.head.is_http_1_1:
            self.client.write(write_response(response, keep_alive=True, is_http_1_1=True))

    def switch_protocols(self, response: ResponseHead) -> None:
        """Relay a 101 response; raw bytes are relayed from here on."""
        self.status = 101
        self.response = response
        self.is_tunnel = True
        self.client.write(write_response(response, keep_alive=True, is_http_1_1=True))
        self.client.tunnel(self)

    def response_head(self, response: ResponseHead, body: bytes) -> None:
        """Relay the response head, with the first bytes of a body of known length."""
        self.response = response
        self.status = response.status
        is_http_1_1 = self.head.is_http_1_1
        self.rechunks = is_http_1_1 and response.framing.length is None
        written = write_response(response, keep_alive=self.keeps_client, is_http_1_1=is_http_1_1)
        if body:
            self.response_bytes += len(body)
            written += body
        self.client.write(written)

    def whole_response(self, response: ResponseHead, body: bytes) -> None:
        """Relay a response that arrived in one piece, as most do."""
        head = self.head
        self.response = response
        self.status = response.status
        self.response_bytes = len(body)
        keeps = head.is_kept
        if keeps and head.is_http_1_1:
            self.client.write(response.usual + body)
        else:
            written = write_response(response, keep_alive=keeps, is_http_1_1=head.is_http_1_1)
            self.client.write(written + body)
        is_done = self.is_request_done
        upstream, self.upstream = self.upstream, None
        if upstream is not None:
            upstream.done(reusable=is_done and response.is_keep_alive)
        self._end()
        self.client.finished(self, keep_alive=is_done and keeps)

    @property
    def keeps_client(self) -> bool:
        """Whether the client's connection is kept for another request."""
        if not self.head.is_kept:
            return False
        if self.head.is_http_1_1 or self.response is None:
            return True
        return self.response.framing.length is not None

    def response_body(self, data: bytes) -> None:
        """Relay a piece of the response body."""
        self.response_bytes += len(data)
        if not self.rechunks:
            self.client.write(data)
        elif len(data) > _NO_COPY_BYTES:
            self.client.write_all((b"%x\r\n" % len(data), data, b"\r\n"))
        else:
            self.client.write(chunk(data))

    def response_end(self, trailers: list[bytes], *, reusable: bool) -> None:
        """Handle the end of the response body."""
        if self.rechunks:
            self.client.write(last_chunk(trailers))
        upstream, self.upstream = self.upstream, None
        if upstream is not None:
            # If the request is not complete, the upstream connection is not reused.
            upstream.done(reusable=reusable and self.is_request_done)
        self._finish(keep_alive=self.is_request_done and self.keeps_client)

    def upstream_eof(self) -> None:
        """Handle end-of-file from the sandbox of a tunnel."""
        self.has_upstream_ended = True
        self.client.write_eof()
        self._close_if_both_ended()

    def _close_if_both_ended(self) -> None:
        if self.has_client_ended and self.has_upstream_ended:
            upstream, self.upstream = self.upstream, None
            if upstream is not None:
                upstream.done(reusable=False)
            self._end()
            self.client.close()

    def upstream_lost(self) -> None:
        """Handle the loss of the upstream connection."""
        self.upstream = None
        if self.is_over:
            return
        if self.is_tunnel:
            self._end()
            self.client.abort()
        elif self.response is not None:
            # The response is incomplete: only an aborted connection shows that to the client.
            self._end()
            self.client.abort()
        elif self._may_retry:
            self.observer.retry(self)
        else:
            self.fail(502, "The sandbox closed the connection before it answered")

    @property
    def _may_retry(self) -> bool:
        return (
            self.is_reusing
            and self.head.method in _SAFE
            and self.head.framing.length == 0
            and self.head.upgrade is None
        )

    # ---- ends ----------------------------------------------------------------------------

    def fail(
        self,
        status: int,
        message: str,
        *,
        port: int | None = None,
        retry_after_seconds: int | None = None,
    ) -> None:
        """Send an error response, or abort if a response has already started."""
        if self.response is not None:
            self.abort()
            return
        keep = self.head.is_kept and self.is_request_done
        self.respond(
            status,
            error_response(
                status,
                message,
                head=self.head,
                sandbox_id=self.sandbox_id,
                port=port,
                retry_after_seconds=retry_after_seconds,
                keep_alive=keep,
            ),
            keep_alive=keep,
        )

    def respond(self, status: int, whole: bytes, *, keep_alive: bool) -> None:
        """Send a complete response of the gateway's own."""
        upstream, self.upstream = self.upstream, None
        if upstream is not None:
            upstream.abort()
        if self.is_over:
            return
        self.status = status
        self.client.write(whole)
        self._finish(keep_alive=keep_alive)

    def client_lost(self) -> None:
        """Handle a client disconnect: only this exchange ends."""
        upstream, self.upstream = self.upstream, None
        if upstream is not None:
            upstream.abort()
        self._end()

    def abort(self) -> None:
        """Abort both sides."""
        upstream, self.upstream = self.upstream, None
        if upstream is not None:
            upstream.abort()
        if not self.is_over:
            self._end()
            self.client.abort()

    def _finish(self, *, keep_alive: bool) -> None:
        self._end()
        self.client.finished(self, keep_alive=keep_alive)

    def _end(self) -> None:
        if self.is_over:
            return
        self.is_over = True
        self.pending = None
        self.held_bytes = 0
        self.observer.exchange_ended(self)
