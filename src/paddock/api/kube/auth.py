"""Authentication: by bearer token or, if enabled, of programs on this machine.

Tokens are compared in constant time and never logged. Without tokens the API is closed, unless
`allow_anonymous` opens it to the loopback interface. Requests that a web page in a browser on this
machine could cause are refused then.
"""

import ipaddress
import re

from starlette.requests import HTTPConnection

from paddock.api.kube.settings import KubeApiSettings
from paddock.kit import bearer
from paddock.kit.errors import ForbiddenError, UnauthenticatedError

_HOST = re.compile(r"(?:\[([0-9a-f:]+)\]|([0-9a-z.-]+))(?::[0-9]+)?", re.IGNORECASE)


def authenticate(connection: HTTPConnection, settings: KubeApiSettings) -> None:
    """Raise unless the caller is authenticated."""
    token = bearer.token_of(connection.headers.get("authorization", ""))
    if token is not None and settings.tokens:
        if bearer.is_known(token, *settings.tokens):
            return
        raise UnauthenticatedError("the bearer token is not known")
    if not settings.allow_anonymous:
        raise UnauthenticatedError(
            "a bearer token is needed", hint="kubectl sends one over https only"
        )
    if not all(_is_loopback(host) for host in _senders(connection)):
        raise UnauthenticatedError("without a token, only programs on this machine have access")
    if "origin" in connection.headers or not _is_local_name(_host(connection)):
        raise ForbiddenError("without a token, requests of web pages are refused")


def _senders(connection: HTTPConnection) -> list[str]:
    """Return the addresses of the sender: the peer, and those in X-Forwarded-For."""
    peer = connection.client.host if connection.client else ""
    forwarded = connection.headers.getlist("x-forwarded-for")
    return [peer, *(host.strip() for line in forwarded for host in line.split(","))]


def _host(connection: HTTPConnection) -> str:
    """Return the host name in the Host header, or an empty string."""
    match = _HOST.fullmatch(connection.headers.get("host", ""))
    return (match[1] or match[2]) if match else ""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_local_name(host: str) -> bool:
    return host == "localhost" or _is_loopback(host)
