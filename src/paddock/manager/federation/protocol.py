"""The protocol between control planes of a federation: messages, peers, ids, signatures. Pure.

`service` decides when to send what. All clusters of a federation have the same seed. The signatures
of their messages and the tokens of their sandboxes derive from it, so a sandbox that another
cluster created accepts the token returned here.
"""

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Mapping

from msgspec import Struct

from paddock.claims.caller import Role
from paddock.claims.requests import NewSandbox
from paddock.kit.clock import Clock
from paddock.kit.errors import FieldProblem, InvalidError, UnauthenticatedError
from paddock.resources.tokens import TokenSeed

PREFIX = "/_federation"
SIGNATURE = "x-paddock-federation"
GATEWAY = "x-paddock-remote"
"""Header with the gateway address of the cluster that owns a sandbox."""
SKEW_SECONDS = 30.0
MAX_HOPS = 1
"""A forwarded claim is served by the cluster that received it, or not at all."""
_TAG = 5
_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz"


class PeerCluster(Struct, frozen=True):
    """Another cluster's control plane."""

    cluster: str
    url: str


class AnnouncedMember(Struct, frozen=True, kw_only=True):
    """One member of one environment, as its own cluster sees it; ages instead of times, because
    clocks differ."""

    namespace: str
    env: str
    name: str
    pool: str
    priority: int = 0
    scaling_group: str = "default"
    idle: int = 0
    pending: int = 0
    headroom: int | None = 0
    saturated_seconds: float = 0.0
    age_seconds: float = 0.0


class Announcement(Struct, frozen=True, kw_only=True):
    """The members and the gateway of one cluster."""

    cluster: str
    gateway: str
    """Address of its sandboxes: `host:port`."""
    members: tuple[AnnouncedMember, ...] = ()


class ForwardedClaim(Struct, frozen=True, kw_only=True):
    """A claim that is forwarded to another cluster."""

    team: str
    role: Role
    key_id: str = ""
    """Given if the key has scopes, which may allow only what it requested."""
    request: NewSandbox
    via: tuple[str, ...]
    """The clusters that forwarded it."""


class ForwardedCall(Struct, frozen=True, kw_only=True):
    """An API call about a sandbox of another cluster."""

    team: str
    role: Role
    scopes: tuple[str, ...] = ()
    key_id: str = ""
    """As in `ForwardedClaim`."""
    method: str
    path: str
    query: str = ""
    body: bytes = b""


class ForwardedReply(Struct, frozen=True, kw_only=True):
    """The other cluster's reply to a forwarded call."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = {}


class AbandonedClaim(Struct, frozen=True):
    """A claim whose caller is gone: its sandbox must be killed."""

    sandbox_id: str


def parse_peers(text: str, own: str) -> tuple[PeerCluster, ...]:
    """Parse comma-separated `cluster=url` pairs."""
    peers: list[PeerCluster] = []
    for part in filter(None, (item.strip() for item in text.split(","))):
        cluster, equals, url = part.partition("=")
        if not equals or not cluster or not url.strip().startswith(("http://", "https://")):
            problem = FieldProblem("federation_peers", f"{part!r} is not cluster=http://host:port")
            hint = "write https:// where the other cluster's gateways serve TLS"
            raise InvalidError(str(problem), problems=[problem], hint=hint)
        peers.append(PeerCluster(cluster.strip(), url.strip().rstrip("/")))
    names = [own, *(peer.cluster for peer in peers)]
    if len(set(names)) != len(names) or len({tag_of(name) for name in names}) != len(names):
        problem = FieldProblem("federation_peers", "every cluster needs a unique name")
        raise InvalidError(str(problem), problems=[problem])
    return tuple(peers)


def tag_of(cluster: str) -> str:
    """Return the tag of a cluster, which is part of the ids of its sandboxes."""
    number = int.from_bytes(hashlib.sha256(cluster.encode()).digest()[:8])
    signs = ""
    for _ in range(_TAG):
        number, digit = divmod(number, len(_ALPHABET))
        signs += _ALPHABET[digit]
    return signs


def remote_id(cluster: str) -> str:
    """Return a new id for a sandbox that another cluster will create."""
    tail = "".join(secrets.choice(_ALPHABET) for _ in range(20 - _TAG))
    return f"f{tag_of(cluster)}{tail}"


def tag_in(sandbox_id: str) -> str:
    """Return the cluster tag of an id; empty if it has none."""
    return sandbox_id[1 : 1 + _TAG] if sandbox_id.startswith("f") and len(sandbox_id) == 21 else ""


_PURPOSE = "federation"


class Signer:
    """Signs messages to peers, and checks that theirs are fresh, for us and not replayed."""

    def __init__(self, seed: TokenSeed, own: str, clock: Clock) -> None:
        self._seed = seed
        self._own = own
        self._clock = clock
        self._nonces: OrderedDict[str, float] = OrderedDict()

    def sign(self, to: str, method: str, path: str, body: bytes) -> str:
        """Return the value of the signature header."""
        at = f"{self._clock.now().timestamp():.3f}"
        nonce = secrets.token_hex(12)
        mark = self._seed.sign(_PURPOSE, _text(self._own, to, method, path, body, at, nonce))
        return f"{self._own};{at};{nonce};{mark}"

    def check(self, header: str, method: str, path: str, body: bytes) -> str:
        """Return the sending cluster; `UnauthenticatedError` if the signature is not valid."""
        parts = header.split(";")
        if len(parts) != 4:
            raise UnauthenticatedError("this endpoint is for other control planes")
        sender, at, nonce, mark = parts
        text = _text(sender, self._own, method, path, body, at, nonce)
        if not self._seed.is_signed(_PURPOSE, text, mark):
            raise UnauthenticatedError("the signature is not from this federation")
        now = self._clock.now().timestamp()
        if abs(now - float(at)) > SKEW_SECONDS:
            raise UnauthenticatedError("the message is too old", hint="synchronize the clocks")
        self._forget(now)
        if nonce in self._nonces:
            raise UnauthenticatedError("the message was received before")
        self._nonces[nonce] = now
        return sender

    def _forget(self, now: float) -> None:
        while self._nonces:
            nonce, at = next(iter(self._nonces.items()))
            if now - at <= 2 * SKEW_SECONDS:
                return
            del self._nonces[nonce]


def _text(sender: str, to: str, method: str, path: str, body: bytes, at: str, nonce: str) -> bytes:
    digest = hashlib.sha256(body).hexdigest()
    return "\n".join((sender, to, method, path, at, nonce, digest)).encode()
