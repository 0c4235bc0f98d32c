"""Who may use the API: those who bear a token, or, when told so, programs of this machine.

Tokens are compared in constant time and never logged. Without tokens the API is closed, unless
`allow_anonymous` opens it to the loopback interface. A browser on this machine is no program of
this machine's user: requests that a web page could cause are refused then.
"""

import ipaddress
import re

from starlette.requests import HTTPConnection

from paddock.api.kube.settings import KubeApiSettings
from paddock.kit import bearer
from paddock.kit.errors import ForbiddenError, UnauthenticatedError

_HOST = re.compile(r"(?:\[([0-9a-f:]+)\]|([0-9a-z.-]+))(?::[0-9]+)?", re.IGNORECASE)


def authenticate(connection: HTTPConnection, settings: KubeApiSettings) -> None:
    """Return where the caller is let in; raise where not."""
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
        raise UnauthenticatedError("without a token only this machine itself is let in")
    if "origin" in connection.headers or not _is_local_name(_host(connection)):
        raise ForbiddenError("without a token web pages are not let in")


def _senders(connection: HTTPConnection) -> list[str]:
    """Give who sent this: the peer and, where a gateway of ours passed it on, those it names."""
    peer = connection.client.host if connection.client else ""
    forwarded = connection.headers.getlist("x-forwarded-for")
    return [peer, *(host.strip() for line in forwarded for host in line.split(","))]


def _host(connection: HTTPConnection) -> str:
    """Give the host that the client believes to speak to, from the header as it was sent."""
    match = _HOST.fullmatch(connection.headers.get("host", ""))
    return (match[1] or match[2]) if match else ""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_local_name(host: str) -> bool:
    return host == "localhost" or _is_loopback(host)
