"""The HTTP client of the CLI: one connection per call."""

import http.client
import socket
import ssl
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

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        *,
        tls: ssl.SSLContext | None = None,
        tls_name: str | None = None,
    ) -> None:
        """Create an endpoint; `tls_name` is the name to verify instead of the host of the URL."""
        self.url = url
        self._tls = tls
        self._tls_name = tls_name
        self._parts = urlsplit(url)
        self.headers = dict(headers)

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
        connection = self._connection(timeout_seconds)
        sent = {**self.headers, **(headers or {})}
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

    def _connection(self, timeout_seconds: float | None) -> http.client.HTTPConnection:
        place = self._parts.netloc
        if self._parts.scheme != "https":
            return http.client.HTTPConnection(place, timeout=timeout_seconds)
        if self._tls is None or self._tls_name is None:
            return http.client.HTTPSConnection(place, timeout=timeout_seconds, context=self._tls)
        return _NamedConnection(place, self._tls, self._tls_name, timeout_seconds)

    def _unavailable(self, error: Exception) -> UnavailableError:
        return UnavailableError(
            f"{self.url} does not answer: {error}",
            hint="`paddock status` shows whether Paddock runs here; `paddock up` starts it",
        )


class _NamedConnection(http.client.HTTPSConnection):
    """Verifies another name than the host that it connects to."""

    def __init__(
        self, place: str, tls: ssl.SSLContext, name: str, timeout_seconds: float | None
    ) -> None:
        super().__init__(place, timeout=timeout_seconds, context=tls)
        self._given_tls = tls
        self._name = name

    def connect(self) -> None:
        """Open the connection."""
        plain = socket.create_connection((self.host, self.port), self.timeout)
        self.sock = self._given_tls.wrap_socket(plain, server_hostname=self._name)


def _message(response: http.client.HTTPResponse) -> str:
    data = response.read()
    try:
        body = msgspec.json.decode(data)
    except msgspec.DecodeError:
        return f"{response.status} {data[:200].decode(errors='replace')}"
    found = cast("dict[str, Any]", body) if isinstance(body, dict) else {}
    return str(found.get("message") or f"{response.status} {response.reason}")
