"""What an exchange lies between: the client's side, the sandbox's, and who decides about it."""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from paddock.gateway.http.client import ClientConnection
    from paddock.gateway.http.exchange import Exchange
    from paddock.gateway.http.request_heads import RequestHead


class PauseReason:
    """Why nothing is read from a side: bits, plain ones, since they are looked at all the time."""

    HELD = 1
    """Nobody takes the body yet."""
    OTHER_SIDE_FULL = 2
    PIPELINE_FULL = 4


class Sink(Protocol):
    """A side that bytes go to."""

    def write(self, data: bytes) -> None:
        """Send bytes."""
        ...

    def write_all(self, pieces: tuple[bytes, ...]) -> None:
        """Send bytes that lie apart."""
        ...

    def pause(self, reason: int) -> None:
        """Take no more from this side for now."""
        ...

    def resume(self, reason: int) -> None:
        """Take from this side again, as far as this reason goes."""
        ...

    def abort(self) -> None:
        """Cut it off, losing what is unsent."""
        ...

    def write_eof(self) -> None:
        """Say that nothing more comes."""
        ...

    def close(self) -> None:
        """Close once everything is sent."""
        ...


class ClientSide(Sink, Protocol):
    """The client's side of an exchange."""

    pauses: int
    """Reasons for which nothing is read from it now."""

    def finished(self, exchange: "Exchange", *, keep_alive: bool) -> None:
        """Go on with the next request, or close."""
        ...

    def tunnel(self, exchange: "Exchange") -> None:
        """Pass bytes on as they are from now on."""
        ...


class UpstreamSide(Sink, Protocol):
    """The sandbox's side of an exchange."""

    def done(self, *, reusable: bool) -> None:
        """Give the connection back, or close it."""
        ...


class ExchangeObserver(Protocol):
    """Hears what becomes of an exchange."""

    def exchange_ended(self, exchange: "Exchange") -> None:
        """Take in that it is over."""
        ...

    def retry(self, exchange: "Exchange") -> None:
        """Send it over another connection: the one it met had just ended."""
        ...


class ConnectionRegistry(Protocol):
    """Knows which connections there are."""

    def add(self, client: "ClientConnection") -> bool:
        """Take in a new connection; says whether there is room for it."""
        ...

    def remove(self, client: "ClientConnection") -> None:
        """Take in that a connection is gone."""
        ...

    def count_refused(self, status: int) -> None:
        """Take in that something was sent that is no request."""
        ...


class RequestHandler(ExchangeObserver, Protocol):
    """Decides what becomes of a request."""

    @property
    def clients(self) -> ConnectionRegistry:
        """Who is connected."""
        ...

    def read(self, block: bytes) -> "RequestHead":
        """Read a head; `BadHead` where that cannot be done in exactly one way."""
        ...

    def dispatch(self, exchange: "Exchange", client: "ClientConnection") -> None:
        """Send a request on, answer it, or hold it; never blocks."""
        ...

    def now(self) -> float:
        """Give monotonic time."""
        ...
