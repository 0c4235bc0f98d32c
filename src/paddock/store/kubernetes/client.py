"""HTTP to one API server: kept connections, limits, retries of what did not happen.

A request is tried again only where the server cannot have acted: it said so (429, 503 with
Retry-After, a refused credential), or the connection never came about, or the request only reads.
A write whose answer is lost is reported as such and never repeated here. Bytes go in and out;
`bodies` and `answers` know what they mean. Requests go through `kit.http_client`, endless answers
through a session of aiohttp's.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncGenerator, Mapping
from functools import cache
from urllib.parse import urlencode

import aiohttp
from msgspec import Struct
from yarl import URL

from paddock.kit import metrics
from paddock.kit.errors import (
    DeadlineExceededError,
    InvalidError,
    PaddockError,
    UnauthenticatedError,
    UnavailableError,
)
from paddock.kit.http_client import HttpClient, NoConnectionError, open_socket
from paddock.kit.logs import fields
from paddock.store.kubernetes import statuses
from paddock.store.kubernetes.access import Access
from paddock.store.kubernetes.limiter import RateLimiter

log = logging.getLogger(__name__)

JSON = "application/json"
MERGE_PATCH = "application/merge-patch+json"

REQUESTS = metrics.counter(
    "paddock_kubernetes_requests_total",
    "Requests to the Kubernetes API server, by verb, kind and the answer's code (0: no answer).",
    ("verb", "resource", "code"),
)
REQUEST_SECONDS = metrics.histogram(
    "paddock_kubernetes_request_seconds",
    "Time from asking the Kubernetes API server to its answer, without waiting for our own limits.",
    ("verb",),
)
THROTTLED_SECONDS = metrics.counter(
    "paddock_kubernetes_throttled_seconds_total",
    "Time that requests waited because of our own rate limit or because the server asked us to.",
)

_FIRST = frozenset({"leases"})
"""Few and urgent: a leader must not lose its lease because it has much to do."""
_BROKEN = (aiohttp.ClientError, OSError)
"""TLS failures that aiohttp does not wrap are OS errors, as broken pipes and timeouts are."""
_jitter = random.SystemRandom()


class ClientSettings(Struct, frozen=True, kw_only=True):
    """How hard one process may lean on the API server."""

    requests_per_second: float = 200.0
    burst: int = 400
    in_flight: int = 64
    """Requests at once; watches are not counted."""
    accept: str = JSON
    """The forms in which objects are taken, best first."""
    timeout_seconds: float = 30.0
    """For one try of one request."""
    connect_timeout_seconds: float = 5.0
    tries: int = 6
    """Of what did not happen; together with `longest_wait_seconds` this bounds a call."""
    longest_wait_seconds: float = 10.0
    """Between two tries, whatever Retry-After says."""
    watch_silence_seconds: float = 100.0
    """Servers send a bookmark every minute or so; a watch silent for longer is dead."""
    page_size: int = 500
    field_manager: str = "paddock"
    user_agent: str = "paddock"


class _TryAgainError(Exception):
    """The server cannot have acted; carries what to raise if there is no next try."""

    def __init__(self, error: PaddockError, after_seconds: float | None = None) -> None:
        super().__init__(error.message)
        self.error = error
        self.after_seconds = after_seconds


class KubernetesClient:
    """Speaks to one API server as one identity."""

    def __init__(self, access: Access, settings: ClientSettings | None = None) -> None:
        self.access = access
        self.settings = settings or ClientSettings()
        self._limiter = RateLimiter(self.settings.requests_per_second, self.settings.burst)
        self._in_flight = asyncio.Semaphore(self.settings.in_flight)
        self._http = HttpClient(
            access.server,
            tls=access.tls,
            tls_server_name=access.tls_server_name,
            connect_seconds=self.settings.connect_timeout_seconds,
        )
        self._always = (
            f" HTTP/1.1\r\nHost: {self._http.host}\r\nUser-Agent: {self.settings.user_agent}"
            f"\r\nAccept: {self.settings.accept}\r\nAccept-Encoding: identity\r\n"
        )
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def request(
        self,
        verb: str,
        path: str,
        *,
        resource: str = "",
        params: Mapping[str, str] | None = None,
        body: bytes | None = None,
        content_type: str = JSON,
    ) -> bytes:
        """Send a request and return the body; an error response raises one of `kit.errors`."""
        tries = 0
        while True:
            tries += 1
            try:
                if resource in _FIRST:
                    return await self._try(verb, path, resource, params, body, content_type)
                async with self._in_flight:
                    await self._turn()
                    return await self._try(verb, path, resource, params, body, content_type)
            except _TryAgainError as failure:
                if tries >= self.settings.tries:
                    raise failure.error from failure
                wait = self._wait_before(tries, failure.after_seconds)
                log.info(
                    "asking the API server again",
                    extra=fields(verb=verb, path=path, tries=tries, cause=str(failure)),
                )
                THROTTLED_SECONDS.inc(wait)
                await asyncio.sleep(wait)

    @contextlib.asynccontextmanager
    async def stream(
        self, path: str, *, resource: str = "", params: Mapping[str, str] | None = None
    ) -> AsyncGenerator[aiohttp.StreamReader]:
        """Open an endless answer, such as a watch. One try: its reader knows how to resume."""
        await self._turn()
        settings = self.settings
        timeout = aiohttp.ClientTimeout(
            total=None,
            sock_connect=settings.connect_timeout_seconds,
            sock_read=settings.watch_silence_seconds,
        )
        try:
            async with self._open(path, params, timeout) as response:
                REQUESTS.labels("WATCH", resource, str(response.status)).inc()
                if response.status != 200:
                    after = response.headers.get("Retry-After", "")
                    try:
                        self._refuse(response.status, after, await response.read(), replayable=True)
                    except _TryAgainError as failure:
                        raise failure.error from failure
                try:
                    yield response.content
                finally:
                    _abandon(response)
        except _BROKEN as error:
            raise self._unreachable(error) from error

    async def close(self) -> None:
        """Close every connection; no request may follow."""
        self._closed = True
        self._http.close()
        if self._session is not None:
            await self._session.close()
        # Transports notify their protocols in later turns of the loop.
        for _ in range(3):
            await asyncio.sleep(0)

    async def _turn(self) -> None:
        waited = await self._limiter.acquire()
        if waited:
            THROTTLED_SECONDS.inc(waited)

    def _wait_before(self, tries: int, after_seconds: float | None) -> float:
        if after_seconds is None:
            after_seconds = 0.05 * 2.0**tries
        # The jitter keeps many clients that were refused together from coming back together.
        return min(after_seconds, self.settings.longest_wait_seconds) * _jitter.uniform(1.0, 1.25)

    async def _try(
        self,
        verb: str,
        path: str,
        resource: str,
        params: Mapping[str, str] | None,
        body: bytes | None,
        content_type: str,
    ) -> bytes:
        if self._closed:
            raise UnavailableError("the Kubernetes client is closed")
        request = await self._request(verb, path, params, body, content_type)
        loop = asyncio.get_running_loop()
        started = loop.time()
        code = 0
        try:
            answer = await self._http.send(request, self.settings.timeout_seconds)
            code = answer.code
        except NoConnectionError as error:
            raise _TryAgainError(self._unreachable(error)) from error
        except TimeoutError as error:
            raise DeadlineExceededError(
                f"the API server did not answer {verb} within {self.settings.timeout_seconds:g} s"
                + ("" if verb == "GET" else "; whether it acted is unknown")
            ) from error
        except OSError as error:
            if verb == "GET":
                raise _TryAgainError(self._unreachable(error)) from error
            raise UnavailableError(
                f"the connection broke during {verb}, whether it was done is unknown: {error!r}",
                hint="read the object before trying again",
            ) from error
        finally:
            _requests(verb, resource, code).inc()
            _seconds(verb).observe(loop.time() - started)
        if code >= 300:
            self._refuse(code, answer.retry_after, answer.body, replayable=verb == "GET")
        return answer.body

    async def _request(
        self,
        verb: str,
        path: str,
        params: Mapping[str, str] | None,
        body: bytes | None,
        content_type: str,
    ) -> bytes:
        """Write a request as it is sent."""
        target = self._http.prefix + path
        if params:
            target = f"{target}?{urlencode(params)}"
        if not _is_one_word(target):
            raise InvalidError(f"{path!r} is not a path")
        head = f"{verb} {target}{self._always}"
        if (authorization := await self.access.credential.header()) is not None:
            if not (authorization.isascii() and authorization.isprintable()):
                raise UnauthenticatedError(
                    "the API server's credential is no text that a request can carry",
                    hint="look for line breaks within the token",
                )
            head += f"Authorization: {authorization}\r\n"
        if body is None:
            return f"{head}\r\n".encode()
        head += f"Content-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
        return head.encode() + body

    @contextlib.asynccontextmanager
    async def _open(
        self, path: str, params: Mapping[str, str] | None, timeout: aiohttp.ClientTimeout
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        headers: dict[str, str] = {}
        if (authorization := await self.access.credential.header()) is not None:
            headers["Authorization"] = authorization
        url = URL(self.access.server + path, encoded=True)
        async with self._connected().request(
            "GET",
            url.with_query(params) if params else url,
            headers=headers,
            timeout=timeout,
            allow_redirects=False,  # a credential is for this server only
            server_hostname=self.access.tls_server_name,
        ) as response:
            yield response

    def _refuse(self, code: int, retry_after: str, body: bytes, *, replayable: bool) -> None:
        """Raise what the answer says."""
        after = float(retry_after) if retry_after.isdigit() else None
        error = statuses.error_from(statuses.read(code, body), retry_after_seconds=after)
        nothing_done = code == 429 or (code == 503 and after is not None)
        if nothing_done or (replayable and code in (500, 502, 503, 504)):
            raise _TryAgainError(error, after)
        if code == 401 and self.access.credential.refused():
            raise _TryAgainError(error, 0.0)
        raise error

    def _unreachable(self, error: BaseException) -> UnavailableError:
        return UnavailableError(
            f"the API server at {self.access.server} cannot be reached: {error!r}",
            retry_after_seconds=1.0,
            hint="check that it runs and that the network lets us through",
        )

    def _connected(self) -> aiohttp.ClientSession:
        if self._closed:
            raise UnavailableError("the Kubernetes client is closed")
        if self._session is None:
            connector = aiohttp.TCPConnector(
                ssl=self.access.tls if self.access.tls is not None else False,
                limit=0,  # watches hold theirs open
                socket_factory=open_socket,
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                headers={
                    # Some servers print for people when they believe a person asks.
                    "User-Agent": self.settings.user_agent,
                    "Accept": self.settings.accept,
                    # Compressing costs an API server far more than a cluster's network does.
                    "Accept-Encoding": "identity",
                },
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=True,
                read_bufsize=1 << 18,
            )
        return self._session


def _abandon(response: aiohttp.ClientResponse) -> None:
    """Cut a stream that has not ended: its server would go on sending into a polite goodbye."""
    connection = response.connection
    if connection is not None and connection.transport is not None:
        connection.transport.abort()


def _is_one_word(text: str) -> bool:
    return text.isascii() and text.isprintable() and " " not in text


@cache
def _requests(verb: str, resource: str, code: int) -> metrics.Counter:
    return REQUESTS.labels(verb, resource, str(code))


@cache
def _seconds(verb: str) -> metrics.Histogram:
    return REQUEST_SECONDS.labels(verb)
