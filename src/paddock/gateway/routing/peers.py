"""Exchange of routes: from the control plane to its gateways, and among gateways.

Every message is signed with a key derived from the installation's seed, carries a timestamp and
a nonce, and is refused if it is old or was seen before: an eavesdropper can neither forge nor
replay a route. `routes` accepts only newer versions, so duplicated, late or reordered messages
do no harm.
"""

import asyncio
import hashlib
import hmac
import logging
import secrets
import ssl
from collections.abc import Callable, Iterable, Mapping
from itertools import islice

import msgspec
from msgspec import Struct, field

from paddock.gateway.routing.routes import Route, RouteTable, RouteTombstone
from paddock.kit.clock import Clock
from paddock.kit.errors import UnauthenticatedError
from paddock.kit.http_client import HttpClient, NoConnectionError
from paddock.kit.logs import fields
from paddock.resources.tokens import TokenSeed

log = logging.getLogger(__name__)

PATH = "/_paddock/routes"
PAUSE_PATH = "/_paddock/pause"
MAX_BODY_BYTES = 16 * 1024 * 1024
MAX_AGE_SECONDS = 30.0
_PURPOSE = "peer"
_TIME, _NONCE, _SIGNATURE = "Paddock-Time", "Paddock-Nonce", "Paddock-Signature"
_ATTEMPTS = 2
_TIMEOUT_SECONDS = 0.25
_BATCH = 500


class RouteUpdate(Struct, frozen=True, kw_only=True):
    """Changed routes and tombstones of removed keys."""

    routes: tuple[Route, ...] = ()
    tombstones: tuple[RouteTombstone, ...] = field(default=(), name="fences")


class TableState(Struct, frozen=True, kw_only=True):
    """The full table of one gateway, for another that missed updates."""

    digest: str
    is_ready: bool = False
    """Whether the sender has completed its own first sync."""
    news: RouteUpdate | None = None


def sign(seed: TokenSeed, method: str, body: bytes, *, now: float, nonce: str) -> dict[str, str]:
    """Return the headers that sign a message."""
    return {
        _TIME: f"{now:.3f}",
        _NONCE: nonce,
        _SIGNATURE: seed.sign(_PURPOSE, _message(method, f"{now:.3f}", nonce, body)),
    }


def _message(method: str, time: str, nonce: str, body: bytes) -> bytes:
    return f"{method}\n{time}\n{nonce}\n{hashlib.sha256(body).hexdigest()}".encode()


class MessageVerifier:
    """Verifies incoming messages: signed by this installation, recent, not replayed."""

    def __init__(self, seed: TokenSeed, clock: Clock) -> None:
        self._seed = seed
        self._clock = clock
        self._seen: dict[str, float] = {}

    def check(self, method: str, headers: Mapping[str, str], body: bytes) -> None:
        """Raise `UnauthenticatedError` unless a message is valid."""
        time, nonce = headers.get(_TIME, ""), headers.get(_NONCE, "")
        message, signature = _message(method, time, nonce, body), headers.get(_SIGNATURE, "")
        if not self._seed.is_signed(_PURPOSE, message, signature):
            raise UnauthenticatedError("the message is not signed by this installation")
        now = self._clock.now().timestamp()
        if abs(now - float(time)) > MAX_AGE_SECONDS:
            raise UnauthenticatedError("the message is too old, or a clock is wrong")
        self._forget_old(now)
        if nonce in self._seen:
            raise UnauthenticatedError("the message was seen before")
        self._seen[nonce] = now

    def _forget_old(self, now: float) -> None:
        # Insertion order: the oldest come first.
        for nonce, at in tuple(islice(self._seen.items(), 64)):
            if now - at <= 2 * MAX_AGE_SECONDS:
                return
            del self._seen[nonce]


class GatewayPeer:
    """Another gateway. Routes are sent to it in batches, one at a time."""

    def __init__(self, url: str, seed: TokenSeed, clock: Clock) -> None:
        self.url = url
        self._http = HttpClient(
            url,
            tls=ssl.create_default_context() if url.startswith("https:") else None,
            tls_server_name=None,
            connect_seconds=_TIMEOUT_SECONDS,
        )
        self._seed = seed
        self._clock = clock
        self._waiting: dict[str, Route] = {}
        self._lock = asyncio.Lock()
        self.failures = 0

    async def send(self, routes: Iterable[Route]) -> bool:
        """Send routes; return whether the gateway accepted them."""
        for route in routes:
            waiting = self._waiting.get(route.uid)
            if waiting is None or waiting.version < route.version:
                self._waiting[route.uid] = route
        # While one batch is sent, the next one accumulates.
        async with self._lock:
            while self._waiting:
                batch = dict(list(self._waiting.items())[:_BATCH])
                for uid in batch:
                    del self._waiting[uid]
                if not await self._send(RouteUpdate(routes=tuple(batch.values()))):
                    return False
        return True

    async def _send(self, news: RouteUpdate) -> bool:
        body = msgspec.msgpack.encode(news)
        for attempt in range(_ATTEMPTS):
            status = await self._request("POST", PATH, body)
            if status is not None and status[0] < 500:
                self.failures = 0
                return status[0] == 204
            await asyncio.sleep(0.01 * (attempt + 1))
        self.failures += 1
        return False

    async def announce_pause(self, route: Route) -> int | None:
        """Send the route of a sandbox that is being paused; return how many requests wait for it.

        Once the gateway has the route, it sends the sandbox no more requests: 0 is final. None: the
        gateway did not answer.
        """
        body = msgspec.msgpack.encode(RouteUpdate(routes=(route,)))
        for attempt in range(_ATTEMPTS):
            response = await self._request("POST", PAUSE_PATH, body)
            if response is not None and response[0] == 200:
                return msgspec.msgpack.decode(response[1], type=int)
            await asyncio.sleep(0.01 * (attempt + 1))
        return None

    async def state(self, digest: str) -> TableState | None:
        """Fetch its table, without content if the digests are equal; None on failure."""
        body = msgspec.msgpack.encode(TableState(digest=digest))
        response = await self._request("PUT", PATH, body)
        if response is None or response[0] != 200:
            return None
        return msgspec.msgpack.decode(response[1], type=TableState)

    async def _request(self, method: str, path: str, body: bytes) -> tuple[int, bytes] | None:
        headers = sign(
            self._seed,
            method,
            body,
            now=self._clock.now().timestamp(),
            nonce=secrets.token_hex(12),
        )
        head = [
            f"{method} {self._http.prefix}{path} HTTP/1.1",
            f"Host: {self._http.host}",
            f"Content-Length: {len(body)}",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        request = "\r\n".join((*head, "", "")).encode() + body
        try:
            response = await self._http.send(request, _TIMEOUT_SECONDS)
        except (NoConnectionError, OSError) as error:
            log.debug("peer was not reached", extra=fields(peer=self.url, error=repr(error)))
            return None
        return response.code, response.body

    def close(self) -> None:
        """Close its connections."""
        self._http.close()


class GatewayPeers:
    """All gateways that routes are sent to."""

    def __init__(self, seed: TokenSeed, clock: Clock) -> None:
        self._seed = seed
        self._clock = clock
        self._by_url: dict[str, GatewayPeer] = {}

    def urls(self) -> tuple[str, ...]:
        return tuple(self._by_url)

    def unreachable(self) -> tuple[str, ...]:
        """Return the URLs of the gateways that did not answer last time."""
        return tuple(url for url, peer in self._by_url.items() if peer.failures)

    def set_urls(self, urls: Iterable[str]) -> None:
        """Replace the set of gateways."""
        wanted = set(urls)
        for url in self._by_url.keys() - wanted:
            self._by_url.pop(url).close()
        for url in wanted - self._by_url.keys():
            self._by_url[url] = GatewayPeer(url, self._seed, self._clock)

    async def send(self, routes: Iterable[Route]) -> int:
        """Send routes to all; return how many accepted. A short timeout bounds the delay."""
        changed = tuple(routes)
        if not self._by_url or not changed:
            return 0
        return sum(await asyncio.gather(*(peer.send(changed) for peer in self._by_url.values())))

    async def announce_pause(self, route: Route) -> dict[str, int]:
        """Send the route of a sandbox that is being paused; return the requests that wait for it,
        by the URL of each gateway that answered."""
        urls = tuple(self._by_url)
        counts = await asyncio.gather(*(self._by_url[url].announce_pause(route) for url in urls))
        return {url: count for url, count in zip(urls, counts, strict=True) if count is not None}

    async def sync(self, table: RouteTable) -> int:
        """Merge the tables of all peers into this one; return how many peers were ready."""
        ready = 0
        for peer in tuple(self._by_url.values()):
            state = await peer.state(table.digest())
            if state is None:
                continue
            ready += state.is_ready
            if state.news is not None:
                apply_update(table, state.news)
        return ready

    def close(self) -> None:
        """Close all connections."""
        for peer in self._by_url.values():
            peer.close()


class PeerEndpoint:
    """Handles messages from the control plane and from other gateways."""

    def __init__(
        self,
        table: RouteTable,
        verifier: MessageVerifier,
        on_routes: Callable[[], None] | None = None,
    ) -> None:
        self._table = table
        self._verifier = verifier
        self._on_news = on_routes

    def receive_routes(self, headers: Mapping[str, str], body: bytes) -> tuple[Route, ...]:
        """Apply a signed route update; return its routes."""
        self._verifier.check("POST", headers, body)
        news = msgspec.msgpack.decode(body, type=RouteUpdate)
        apply_update(self._table, news)
        if self._on_news is not None:
            self._on_news()
        return news.routes

    def serve_state(self, headers: Mapping[str, str], body: bytes) -> bytes:
        """Return the full table, or only the digest if the sender's is equal."""
        self._verifier.check("PUT", headers, body)
        theirs = msgspec.msgpack.decode(body, type=TableState).digest
        ours = self._table.digest()
        same = hmac.compare_digest(theirs.encode(), ours.encode())
        news = (
            None
            if same
            else RouteUpdate(routes=self._table.all(), tombstones=self._table.tombstones())
        )
        state = TableState(digest=ours, is_ready=self._table.is_ready, news=news)
        return msgspec.msgpack.encode(state)


def apply_update(table: RouteTable, news: RouteUpdate) -> None:
    """Apply an update to a table: tombstones first, so that nothing older comes back."""
    for tombstone in news.tombstones:
        table.remove(tombstone.key, tombstone.version)
    for route in news.routes:
        table.put(route)
