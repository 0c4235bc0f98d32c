"""Access control, checked before anything else happens, waking included.

envd requires the sandbox's token; other ports are public unless the sandbox is private. Tokens
are compared in constant time against hashes. A few paths of envd need no token (health, and
files by signed URL, which envd verifies itself): such requests pass, but do not wake a sandbox
unless the caller is authorized.
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
"""envd serves these without a token: the first returns only that it is up, the second requires a
signature."""
INTERNAL_PATHS = frozenset(
    ("/init", "/freeze", "/unfreeze", "/collapse", "/fsfreeze", "/fsthaw", "/upgrade")
)
"""Endpoints of envd for the node only; never reachable through the gateway."""
_PLAIN_PATH = re.compile(r"(?:/[A-Za-z0-9_\-][A-Za-z0-9_.\-]*)+")

_SECURED_PREFIX = "Sandbox is secured with traffic access token. "
MISSING = _SECURED_PREFIX + "Token header 'e2b-traffic-access-token' is missing"
WRONG = _SECURED_PREFIX + "Provided token is invalid"
UNAUTHORIZED = "unauthorized: invalid or missing access token"


class Allowed(Enum):
    """An allowed request, and whether it may wake the sandbox."""

    MAY_WAKE = "may wake"
    RUNNING_ONLY = "running only"
    """It reaches a running sandbox, but does not wake a paused one."""


class Denied(Struct, frozen=True):
    """Why a request is refused."""

    status: int
    message: str


_NOT_FOUND = Denied(404, "not found")
_UNAUTHORIZED = Denied(401, UNAUTHORIZED)


def check(
    route: Route, *, port: int, target: str, access_hash: str, traffic_token: str | None
) -> Allowed | Denied:
    """Return whether a request may pass, and whether it may wake the sandbox.

    `access_hash` is the hash of the envd access token in the request; empty if there is none.
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


def shows_token(route: Route, *, access_hash: str, traffic_token: str | None) -> bool:
    """Whether a request shows a valid token of the sandbox, required or not."""
    known = route.access_token_hash
    if access_hash and known and compare_digest(access_hash, known):
        return True
    if traffic_token is None or not route.traffic_token_hash:
        return False
    return matches(traffic_token, route.traffic_token_hash)


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
    """Return a path as a lenient server might read it: decoded, without dots and double slashes."""
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
