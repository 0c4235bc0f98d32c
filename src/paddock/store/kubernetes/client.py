"""HTTP client for one API server: connection reuse, limits, safe retries.

A request is retried only if the server cannot have executed it: it said so (429, 503 with
Retry-After, 401), or no connection was established, or the request is a read. A write whose
response is lost is reported as such and never repeated. Bodies are bytes; `bodies` and `responses`
encode and decode them. Requests use `kit.http_client`, watches use an aiohttp session.
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
    "Requests to the Kubernetes API server, by verb, kind and response code (0: no response).",
    ("verb", "resource", "code"),
)
REQUEST_SECONDS = metrics.histogram(
    "paddock_kubernetes_request_seconds",
    "Time from request to response of the Kubernetes API server, without client-side limits.",
    ("verb",),
)
THROTTLED_SECONDS = metrics.counter(
    "paddock_kubernetes_throttled_seconds_total",
    "Time that requests waited for the client-side rate limit or for Retry-After.",
)

_UNLIMITED = frozenset({"leases"})
"""Few and urgent: a busy leader must not lose its lease to the client-side limits."""
_CONNECTION_ERRORS = (aiohttp.ClientError, OSError)
"""TLS errors that aiohttp does not wrap are OSErrors, as are broken pipes and timeouts."""
_jitter = random.SystemRandom()


class ClientSettings(Struct, frozen=True, kw_only=True):
    """Limits and timeouts for requests of one process to the API server."""

    requests_per_second: float = 200.0
    burst: int = 400
    in_flight: int = 64
    """Maximum number of concurrent requests, without watches."""
    accept: str = JSON
    """Value of the Accept header."""
    timeout_seconds: float = 30.0
    """For one attempt of one request."""
    connect_timeout_seconds: float = 5.0
    tries: int = 6
    """Attempts per request; together with `longest_wait_seconds` this bounds a call."""
    longest_wait_seconds: float = 10.0
    """Maximum delay between two attempts, even if Retry-After is longer."""
    watch_silence_seconds: float = 100.0
    """Servers send a bookmark about every minute; a watch without data for this long is dead."""
    page_size: int = 500
    field_manager: str = "paddock"
    user_agent: str = "paddock"


class _RetryableError(Exception):
    """The request may be retried; carries the error to raise if no attempt is left."""

    def __init__(self, error: PaddockError, after_seconds: float | None = None) -> None:
        super().__init__(error.message)
        self.error = error
        self.after_seconds = after_seconds


class KubernetesClient:
    """Sends requests to one API server with one identity."""

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
                if resource in _UNLIMITED:
                    return await self._try(verb, path, resource, params, body, content_type)
                async with self._in_flight:
                    await self._wait_for_limit()
                    return await self._try(verb, path, resource, params, body, content_type)
            except _RetryableError as failure:
                if tries >= self.settings.tries:
                    raise failure.error from failure
                wait = self._wait_before(tries, failure.after_seconds)
                log.info(
                    "retrying a request to the API server",
                    extra=fields(verb=verb, path=path, tries=tries, cause=str(failure)),
                )
                THROTTLED_SECONDS.inc(wait)
                await asyncio.sleep(wait)

    @contextlib.asynccontextmanager
    async def stream(
        self, path: str, *, resource: str = "", params: Mapping[str, str] | None = None
    ) -> AsyncGenerator[aiohttp.StreamReader]:
        """Open a stream, such as a watch. One attempt: the caller resumes it."""
        await self._wait_for_limit()
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
                        self._raise_error(
                            response.status, after, await response.read(), is_read=True
                        )
                    except _RetryableError as failure:
                        raise failure.error from failure
                try:
                    yield response.content
                finally:
                    _abort(response)
        except _CONNECTION_ERRORS as error:
            raise self._unreachable(error) from error

    async def close(self) -> None:
        """Close every connection; no request may follow."""
        self._closed = True
        self._http.close()
        if self._session is not None:
            await self._session.close()
        # Transports close in later iterations of the event loop.
        for _ in range(3):
            await asyncio.sleep(0)

    async def _wait_for_limit(self) -> None:
        waited = await self._limiter.acquire()
        if waited:
            THROTTLED_SECONDS.inc(waited)

    def _wait_before(self, tries: int, after_seconds: float | None) -> float:
        if after_seconds is None:
            after_seconds = 0.05 * 2.0**tries
        # Jitter spreads the retries of clients that were rejected at the same time.
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
            response = await self._http.send(request, self.settings.timeout_seconds)
            code = response.code
        except NoConnectionError as error:
            raise _RetryableError(self._unreachable(error)) from error
        except TimeoutError as error:
            raise DeadlineExceededError(
                f"no response from the API server to {verb} within "
                f"{self.settings.timeout_seconds:g} s"
                + ("" if verb == "GET" else "; its outcome is unknown")
            ) from error
        except OSError as error:
            if verb == "GET":
                raise _RetryableError(self._unreachable(error)) from error
            raise UnavailableError(
                f"the connection broke during {verb}; its outcome is unknown: {error!r}",
                hint="read the object before a retry",
            ) from error
        finally:
            _requests(verb, resource, code).inc()
            _seconds(verb).observe(loop.time() - started)
        if code >= 300:
            self._raise_error(code, response.retry_after, response.body, is_read=verb == "GET")
        return response.body

    async def _request(
        self,
        verb: str,
        path: str,
        params: Mapping[str, str] | None,
        body: bytes | None,
        content_type: str,
    ) -> bytes:
        """Return the encoded request."""
        target = self._http.prefix + path
        if params:
            target = f"{target}?{urlencode(params)}"
        if not _is_request_target(target):
            raise InvalidError(f"{path!r} is not a valid path")
        head = f"{verb} {target}{self._always}"
        if (authorization := await self.access.credential.header()) is not None:
            if not (authorization.isascii() and authorization.isprintable()):
                raise UnauthenticatedError(
                    "the credential for the API server contains invalid characters",
                    hint="check the token for line breaks",
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
            allow_redirects=False,  # do not send the credential to another server
            server_hostname=self.access.tls_server_name,
        ) as response:
            yield response

    def _raise_error(self, code: int, retry_after: str, body: bytes, *, is_read: bool) -> None:
        """Raise the error of a response; `_RetryableError` if the request may be retried."""
        after = float(retry_after) if retry_after.isdigit() else None
        error = statuses.error_from(statuses.read(code, body), retry_after_seconds=after)
        not_executed = code == 429 or (code == 503 and after is not None)
        if not_executed or (is_read and code in (500, 502, 503, 504)):
            raise _RetryableError(error, after)
        if code == 401 and self.access.credential.rejected():
            raise _RetryableError(error, 0.0)
        raise error

    def _unreachable(self, error: BaseException) -> UnavailableError:
        return UnavailableError(
            f"the API server at {self.access.server} cannot be reached: {error!r}",
            retry_after_seconds=1.0,
            hint="check that it is running and reachable from here",
        )

    def _connected(self) -> aiohttp.ClientSession:
        if self._closed:
            raise UnavailableError("the Kubernetes client is closed")
        if self._session is None:
            connector = aiohttp.TCPConnector(
                ssl=self.access.tls if self.access.tls is not None else False,
                limit=0,  # no limit, as every watch holds a connection
                socket_factory=open_socket,
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                headers={
                    # Some servers send text for humans to unknown user agents.
                    "User-Agent": self.settings.user_agent,
                    "Accept": self.settings.accept,
                    # Compression costs the API server more than the network of a cluster.
                    "Accept-Encoding": "identity",
                },
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=True,
                read_bufsize=1 << 18,
            )
        return self._session


def _abort(response: aiohttp.ClientResponse) -> None:
    """Abort a stream that has not ended; a graceful close would wait while the server sends."""
    connection = response.connection
    if connection is not None and connection.transport is not None:
        connection.transport.abort()


def _is_request_target(text: str) -> bool:
    return text.isascii() and text.isprintable() and " " not in text


@cache
def _requests(verb: str, resource: str, code: int) -> metrics.Counter:
    return REQUESTS.labels(verb, resource, str(code))


@cache
def _seconds(verb: str) -> metrics.Histogram:
    return REQUEST_SECONDS.labels(verb)
