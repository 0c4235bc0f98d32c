"""Who may reach what in a sandbox: decided before anything else happens, waking included.

envd asks for the sandbox's token; other ports are public unless the sandbox is private. Tokens
are compared in constant time against hashes. A few paths of envd answer strangers (its health,
files by signed URL, which it checks itself): those pass, but never wake anything unless the
caller has shown a right to.
"""

import re
from enum import Enum
from hmac import compare_digest
from urllib.parse import unquote

from msgspec import Struct

from paddock.gateway.routing.addressing import ENVD_PORT, TASKS_PORT
from paddock.gateway.routing.routes import Route
from paddock.resources.tokens import matches

UNAUTHENTICATED_PATHS = frozenset(("/health", "/files"))
"""envd answers these without a token: the first tells only that it is there, the second asks for
a signature."""
INTERNAL_PATHS = frozenset(
    ("/init", "/freeze", "/unfreeze", "/collapse", "/fsfreeze", "/fsthaw", "/upgrade")
)
"""Between the node and envd; for nobody outside."""
_PLAIN_PATH = re.compile(r"(?:/[A-Za-z0-9_\-][A-Za-z0-9_.\-]*)+")

_SECURED_PREFIX = "Sandbox is secured with traffic access token. "
MISSING = _SECURED_PREFIX + "Token header 'e2b-traffic-access-token' is missing"
WRONG = _SECURED_PREFIX + "Provided token is invalid"
UNAUTHORIZED = "unauthorized: invalid or missing access token"


class Allowed(Enum):
    """A request that may go on."""

    MAY_WAKE = "and wake"
    RUNNING_ONLY = "as stranger"
    """To a sandbox that runs; it wakes none."""


class Denied(Struct, frozen=True):
    """Why a request goes no further."""

    status: int
    message: str


_NOT_FOUND = Denied(404, "not found")
_UNAUTHORIZED = Denied(401, UNAUTHORIZED)


def check(
    route: Route, *, port: int, target: str, access_hash: str, traffic_token: str | None
) -> Allowed | Denied:
    """Say whether a request may pass, and whether it may wake.

    `access_hash` is the hash of the token that was shown to envd; empty where none was.
    """
    if port in (ENVD_PORT, TASKS_PORT):
        return _envd(route, port, target, access_hash)
    if not route.traffic_token_hash:
        return Allowed.MAY_WAKE
    if traffic_token is None:
        return Denied(403, MISSING)
    if not matches(traffic_token, route.traffic_token_hash):
        return Denied(403, WRONG)
    return Allowed.MAY_WAKE


def _envd(route: Route, port: int, target: str, shown: str) -> Allowed | Denied:
    path = target.partition("?")[0]
    if port == ENVD_PORT and canonical(path) in INTERNAL_PATHS:
        return _NOT_FOUND
    if not route.access_token_hash:
        return Allowed.MAY_WAKE
    if shown:
        return Allowed.MAY_WAKE if compare_digest(shown, route.access_token_hash) else _UNAUTHORIZED
    if port == ENVD_PORT and path in UNAUTHENTICATED_PATHS:
        return Allowed.RUNNING_ONLY
    return _UNAUTHORIZED


def canonical(path: str) -> str:
    """Write a path as a lenient server might read it: decoded, without dots and double slashes."""
    if path == "/" or _PLAIN_PATH.fullmatch(path):
        return path.lower()
    kept: list[str] = []
    for part in unquote(unquote(path)).replace("\\", "/").split("/"):
        name = part.partition(";")[0].strip()
        if name == "..":
            del kept[-1:]
        elif name not in ("", "."):
            kept.append(name.lower())
    return "/" + "/".join(kept)
