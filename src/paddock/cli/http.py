"""The HTTP client of the CLI: one connection per call."""

import http.client
from collections.abc import Generator, Mapping
from contextlib import closing, contextmanager
from typing import Any, cast
from urllib.parse import urlsplit

import msgspec

from paddock.kit.errors import PaddockError, UnavailableError


class CallError(PaddockError):
    """The server responded with an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Endpoint:
    """A server, with the headers that every request carries."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self.url = url
        self._parts = urlsplit(url)
        self._headers = dict(headers)

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_seconds: float | None = 120,
    ) -> Any:
        """Send JSON or bytes; return the decoded response."""
        with self.open(
            method, path, body, headers=headers, timeout_seconds=timeout_seconds
        ) as response:
            data = response.read()
        return msgspec.json.decode(data) if data else None

    @contextmanager
    def open(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_seconds: float | None = 120,
    ) -> Generator[http.client.HTTPResponse]:
        """Send a request; yield the response for streaming."""
        secure = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = kind(self._parts.netloc, timeout=timeout_seconds)
        sent = {**self._headers, **(headers or {})}
        if body is not None and not isinstance(body, (bytes, bytearray)):
            if not hasattr(body, "read"):
                body = msgspec.json.encode(body)
            sent.setdefault("Content-Type", "application/json")
        with closing(connection):
            try:
                connection.request(method, self._parts.path + path, body, sent)
                response = connection.getresponse()
                problem = _message(response) if response.status >= 400 else ""
            except (OSError, http.client.HTTPException) as error:
                raise self._unavailable(error) from error
            if problem:
                raise CallError(response.status, problem)
            try:
                yield response
            except (TimeoutError, ConnectionError, http.client.HTTPException) as error:
                # Other errors come from the caller that handles the response.
                raise self._unavailable(error) from error

    def _unavailable(self, error: Exception) -> UnavailableError:
        return UnavailableError(
            f"{self.url} does not answer: {error}",
            hint="`paddock status` shows whether Paddock runs here; `paddock up` starts it",
        )


def _message(response: http.client.HTTPResponse) -> str:
    data = response.read()
    try:
        body = msgspec.json.decode(data)
    except msgspec.DecodeError:
        return f"{response.status} {data[:200].decode(errors='replace')}"
    found = cast("dict[str, Any]", body) if isinstance(body, dict) else {}
    return str(found.get("message") or f"{response.status} {response.reason}")
