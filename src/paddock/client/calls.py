"""JSON calls over HTTP, and the errors that their responses report."""

from collections.abc import AsyncGenerator, Container, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import aiohttp
import msgspec
from msgspec import Struct

from paddock.kit.errors import (
    ConflictError,
    DeadlineExceededError,
    DiskFullError,
    ForbiddenError,
    InvalidError,
    NotFoundError,
    PaddockError,
    QuotaExceededError,
    RateLimitedError,
    TooLargeError,
    UnauthenticatedError,
    UnavailableError,
    UnsupportedError,
)

CALL_SECONDS = 120.0
MAX_RESPONSE_BYTES = 8 << 20
_MAX_MESSAGE_BYTES = 4096
_KINDS: Mapping[int, type[PaddockError]] = {
    400: InvalidError,
    401: UnauthenticatedError,
    403: ForbiddenError,
    404: NotFoundError,
    409: ConflictError,
    410: NotFoundError,
    413: TooLargeError,
    501: UnsupportedError,
    504: DeadlineExceededError,
    507: DiskFullError,
}
T = TypeVar("T")


class _Refusal(Struct, frozen=True):
    message: str = ""


class HttpCalls:
    """Calls to one server, with the headers that each of them carries."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, headers: Mapping[str, str]
    ) -> None:
        self.session = session
        self.url = url.rstrip("/")
        self.headers = dict(headers)

    async def json(
        self,
        method: str,
        path: str,
        kind: type[T],
        body: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
    ) -> T:
        """Send JSON; return the decoded response. `TooLargeError` if it is too long."""
        data = await self.read(method, path, body, headers=headers)
        return self.decode(data, kind)

    async def read(
        self, method: str, path: str, body: Any = None, *, headers: Mapping[str, str] | None = None
    ) -> bytes:
        """Send JSON; return the response as it is. `TooLargeError` if it is too long."""
        sent = {**(headers or {}), "Content-Type": "application/json"}
        data = None if body is None else msgspec.json.encode(body)
        async with self.open(method, path, data=data, headers=sent) as response:
            received = bytearray()
            async for chunk in response.content.iter_any():
                received += chunk
                if len(received) > MAX_RESPONSE_BYTES:
                    raise TooLargeError(
                        f"{self.url} sent a response of more than {MAX_RESPONSE_BYTES >> 20} MiB"
                    )
        return bytes(received)

    def decode(self, data: bytes, kind: type[T]) -> T:
        """Return the value in a response."""
        try:
            return msgspec.json.decode(data or b"null", type=kind)
        except msgspec.DecodeError as error:
            raise UnavailableError(
                f"{self.url} sent a response that cannot be decoded: {error}"
            ) from error

    @asynccontextmanager
    async def open(
        self,
        method: str,
        path: str,
        *,
        data: bytes | None = None,
        params: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        seconds: float | None = CALL_SECONDS,
        accepted: Container[int] = (),
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """Send a request; yield the response. A response that reports an error is raised.

        `accepted`: statuses of errors that the caller handles.
        """
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=30)
        try:
            async with self.session.request(
                method,
                self.url + path,
                data=data,
                params=params,
                headers={**self.headers, **(headers or {})},
                timeout=timeout,
                # Code in a sandbox may answer: it must not choose where requests go.
                allow_redirects=False,
            ) as response:
                if 300 <= response.status < 400:
                    raise _redirected(self.url, response)
                if response.status >= 400 and response.status not in accepted:
                    raise refusal(response, await response.content.read(_MAX_MESSAGE_BYTES))
                yield response
        except TimeoutError as error:
            raise DeadlineExceededError(f"{self.url} did not answer in time") from error
        except (aiohttp.ClientError, OSError) as error:
            raise UnavailableError(
                f"{self.url} does not answer: {error}",
                hint="`paddock status` shows whether Paddock runs here; `paddock up` starts it",
            ) from error


def _redirected(url: str, response: aiohttp.ClientResponse) -> PaddockError:
    location = response.headers.get("Location", "")[:256]
    return UnavailableError(
        f"{url} answered with a redirect to {location!r}, which is not followed",
        hint="if that is the address of Paddock, use it",
    )


def refusal(response: aiohttp.ClientResponse, body: bytes) -> PaddockError:
    """Return the error that a response reports."""
    status = response.status
    try:
        message = msgspec.json.decode(body, type=_Refusal).message
    except msgspec.DecodeError:
        message = body[:512].decode(errors="replace")
    message = message or f"{status} {response.reason}"
    retry = response.headers.get("Retry-After", "")
    seconds = float(retry) if retry.isdecimal() else None
    if status == 429:
        if seconds is None:
            return QuotaExceededError(message)
        return RateLimitedError(message, retry_after_seconds=seconds)
    if (kind := _KINDS.get(status)) is not None:
        return kind(message)
    return UnavailableError(message, retry_after_seconds=seconds)
