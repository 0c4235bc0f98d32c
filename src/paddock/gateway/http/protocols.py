"""Protocols around an exchange: client side, upstream side, observer and request handler."""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from paddock.gateway.http.client import ClientConnection
    from paddock.gateway.http.exchange import Exchange
    from paddock.gateway.http.request_heads import RequestHead


class PauseReason:
    """Why reading from a side is paused: bits; plain integers, since they are on the hot path."""

    HELD = 1
    """The body has no upstream yet."""
    OTHER_SIDE_FULL = 2
    PIPELINE_FULL = 4


class Sink(Protocol):
    """A side that bytes are written to."""

    def write(self, data: bytes) -> None: ...

    def write_all(self, pieces: tuple[bytes, ...]) -> None:
        """Write several buffers without joining them."""
        ...

    def pause(self, reason: int) -> None:
        """Stop reading from this side for this reason."""
        ...

    def resume(self, reason: int) -> None:
        """Read from this side again, unless another reason remains."""
        ...

    def abort(self) -> None:
        """Abort the connection, dropping unsent bytes."""
        ...

    def write_eof(self) -> None:
        """Half-close: no more bytes follow."""
        ...

    def close(self) -> None:
        """Close once everything is sent."""
        ...


class ClientSide(Sink, Protocol):
    """The client's side of an exchange."""

    pauses: int
    """The reasons for which reading is paused now."""

    def finished(self, exchange: "Exchange", *, keep_alive: bool) -> None:
        """Continue with the next request, or close."""
        ...

    def tunnel(self, exchange: "Exchange") -> None:
        """Relay raw bytes from now on."""
        ...


class UpstreamSide(Sink, Protocol):
    """The sandbox's side of an exchange."""

    def done(self, *, reusable: bool) -> None:
        """Return the connection to the pool, or close it."""
        ...


class ExchangeObserver(Protocol):
    """Notified when an exchange ends or must be retried."""

    def exchange_ended(self, exchange: "Exchange") -> None:
        """Handle the end of an exchange."""
        ...

    def retry(self, exchange: "Exchange") -> None:
        """Send the request over another connection: the reused one had just closed."""
        ...


class ConnectionRegistry(Protocol):
    """The open client connections."""

    def add(self, client: "ClientConnection", descriptor: int) -> str | None:
        """Register a new connection; return why it is refused, or None."""
        ...

    def served(self, client: "ClientConnection") -> None:
        """Record that a connection has sent its first request."""
        ...

    def remove(self, client: "ClientConnection") -> None:
        """Unregister a closed connection."""
        ...

    def count_refused(self, status: int) -> None:
        """Count bytes that are not a valid request, by the status of the response."""
        ...


class RequestHandler(ExchangeObserver, Protocol):
    """Reads and dispatches requests."""

    @property
    def clients(self) -> ConnectionRegistry:
        """The open client connections."""
        ...

    def read(self, block: bytes) -> "RequestHead":
        """Parse a head; raises `BadHead` if it is ambiguous or malformed."""
        ...

    def dispatch(self, exchange: "Exchange", client: "ClientConnection") -> None:
        """Forward a request, answer it, or hold it; never blocks."""
        ...

    def now(self) -> float:
        """Return monotonic time."""
        ...
