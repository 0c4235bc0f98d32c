"""Routes that this gateway process can serve.

A table from sandbox id to address, fed by the Sandbox informer and by peers. Reads are one
dictionary lookup and never wait. Only strictly newer versions change a route; a deleted one
leaves a tombstone for a while, so that a late message cannot bring it back. Every state but dead is
kept, paused ones included: their requests are held, not refused (`waking.waker`).
"""

import hashlib
from collections.abc import Callable
from datetime import datetime, timedelta

from msgspec import Struct, structs

from paddock.cache import states
from paddock.cache.states import SandboxState
from paddock.kit.clock import Clock
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.kinds.template import PauseStrategy
from paddock.resources.meta import Key
from paddock.resources.tokens import hashed
from paddock.resources.transitions.pause_strategy import strategy_of

TOMBSTONE_SECONDS = 600.0
REMOTE_SECONDS = 5.0
"""How long a route to another cluster is valid."""
_CLEANING_SECONDS = 60.0


class Route(Struct, frozen=True, kw_only=True):
    """How one sandbox is reached, and with which tokens."""

    id: str
    key: Key
    uid: str
    version: int
    state: SandboxState
    wakes: bool = False
    owner: str = ""
    access_token_hash: str = ""
    traffic_token_hash: str = ""
    mask_host: str | None = None
    ip: str | None = None
    envd: str | None = None
    node: str | None = None
    incarnation: int = 0
    is_rebooted: bool = False
    """Whether its processes ended with its last pause."""
    loses_processes: bool = False
    """Whether it is paused, or being paused, in a way that ends its processes."""
    pause_requested_at: datetime | None = None
    """When the pause that it is in was requested, if that is known."""
    ends_at: datetime | None = None
    """The sandbox counts as dead from this time on, whatever its state."""
    remote: str | None = None
    """The gateway of another cluster, `host:port`, through which the sandbox is reached."""


def route_of(sandbox: Sandbox, now: datetime) -> Route | None:
    """Return the route of a claimed sandbox; None if it is not claimed."""
    claim = sandbox.spec.claim
    if claim is None:
        return None
    address = sandbox.status.address
    network = sandbox.spec.network
    before_pause = sandbox.spec.before_pause
    wake = sandbox.spec.wake_on_traffic
    return Route(
        id=claim.sandbox_id,
        key=sandbox.key,
        uid=sandbox.metadata.uid,
        version=int(sandbox.metadata.resource_version or 0),
        state=states.state(sandbox, now),
        wakes=bool(wake and wake.enabled),
        owner=claim.owner,
        access_token_hash=claim.access_token_hash,
        traffic_token_hash=claim.traffic_token_hash,
        mask_host=network.mask_request_host if network else None,
        ip=address.ip,
        envd=address.envd,
        node=address.node,
        incarnation=sandbox.status.incarnation,
        loses_processes=sandbox.spec.paused and strategy_of(sandbox.spec) is PauseStrategy.STOP,
        pause_requested_at=before_pause.requested_at if before_pause else None,
        is_rebooted=sandbox.status.pause_strategy is PauseStrategy.STOP,
        ends_at=sandbox.spec.shutdown_time,
    )


def remote_route(route: Route, gateway: str, now: datetime) -> Route:
    """Return the route of a sandbox in another cluster, through that cluster's gateway.

    It is valid for a short time, since its changes are not announced here; whether the sandbox is
    paused is up to its own gateway.
    """
    until = now + timedelta(seconds=REMOTE_SECONDS)
    return structs.replace(
        route,
        key=Key("@remote", route.id),
        version=int(now.timestamp() * 1_000_000),
        state=SandboxState.RUNNING,
        wakes=False,
        remote=gateway,
        ends_at=min(route.ends_at, until) if route.ends_at is not None else until,
    )


class RouteTombstone(Struct, frozen=True):
    """A removed key: no route up to this version is accepted."""

    key: Key
    version: int


class _TombstoneEntry(Struct, frozen=True):
    version: int
    until: float


class RouteTable:
    """All routes of one gateway."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._active: dict[str, Route] = {}
        self._by_key: dict[Key, Route] = {}
        self._by_token: dict[str, str] = {}
        """Sandbox ids by the hash of their access token."""
        self._tombstones: dict[Key, _TombstoneEntry] = {}
        self._ended: dict[str, float] = {}
        """Ids of sandboxes that ended or were released, each for as long as its tombstone."""
        self._cleaned_at = clock.monotonic()
        self._listeners: list[Callable[[Route | None, Route | None], None]] = []
        self.is_ready = False
        """Set when the first sync is complete; gates serving, not updates."""

    def __len__(self) -> int:
        return len(self._active)

    def get(self, sandbox_id: str) -> Route | None:
        """Return a live route, or None."""
        route = self._active.get(sandbox_id)
        if route is not None and route.ends_at is not None and route.ends_at <= self._clock.now():
            return None
        return route

    def has_ended(self, sandbox_id: str) -> bool:
        """Whether a sandbox is known to have ended, rather than unknown."""
        return sandbox_id in self._ended

    def get_by_token(self, token: str) -> Route | None:
        """Return the live route of the sandbox with this access token, or None."""
        sandbox_id = self._by_token.get(hashed(token))
        return None if sandbox_id is None else self.get(sandbox_id)

    def all(self) -> tuple[Route, ...]:
        """Return all routes, for peers and signed URLs."""
        return tuple(self._active.values())

    def tombstones(self) -> tuple[RouteTombstone, ...]:
        """Return all tombstones, for peers."""
        return tuple(
            RouteTombstone(key, tombstone.version) for key, tombstone in self._tombstones.items()
        )

    def digest(self) -> str:
        """Return a hash of the table: equal digests mean equal tables."""
        routes = (f"{route.key}={route.version}" for route in self._by_key.values())
        tombstones = (f"-{key}={tombstone.version}" for key, tombstone in self._tombstones.items())
        text = "\n".join(sorted((*routes, *tombstones)))
        return hashlib.sha256(text.encode()).hexdigest()

    def on_change(self, listener: Callable[[Route | None, Route | None], None]) -> None:
        """Call the listener with the old and the new route on every change."""
        self._listeners.append(listener)

    def observe(self, old: Sandbox | None, new: Sandbox | None) -> None:
        """Apply one event of the Sandbox informer."""
        if new is not None:
            if (route := route_of(new, self._clock.now())) is not None:
                self.put(route)
            elif (known := self._by_key.get(new.key)) is not None:
                # Released to its pool.
                self.remove(known.key, int(new.metadata.resource_version or 0))
        elif old is not None:
            self.remove(old.key, int(old.metadata.resource_version or 0))

    def put(self, route: Route) -> bool:
        """Add or replace a route if it is strictly newer; return whether it was."""
        self._clean()
        known = self._by_key.get(route.key)
        if known is not None and route.version <= known.version:
            return False
        tombstone = self._tombstones.get(route.key)
        if tombstone is not None and route.version <= tombstone.version:
            return False
        if route.state is SandboxState.DEAD:
            self.remove(route.key, route.version)
            return True
        if known is not None and known.id != route.id:
            self._release(known)
        self._by_key[route.key] = route
        holder = self._active.get(route.id)
        if holder is None or holder.key == route.key or route.version > holder.version:
            # Of two objects with the same id the newer one wins; the other stays as a watermark.
            self._active[route.id] = route
            self._ended.pop(route.id, None)
            if route.access_token_hash:
                self._by_token[route.access_token_hash] = route.id
            self._notify(holder, route)
        return True

    def remove(self, key: Key, version: int) -> None:
        """Remove a route and keep a tombstone against older versions of it."""
        known = self._by_key.get(key)
        if known is not None and version < known.version:
            return
        tombstone = self._tombstones.get(key)
        if tombstone is not None and tombstone.version > version:
            return
        until = self._clock.monotonic() + TOMBSTONE_SECONDS
        self._tombstones[key] = _TombstoneEntry(version, until)
        if known is not None:
            del self._by_key[key]
            self._release(known)
            if known.id not in self._active:
                self._ended[known.id] = until

    def _release(self, route: Route) -> None:
        if (holder := self._active.get(route.id)) is not None and holder.key == route.key:
            del self._active[route.id]
            self._by_token.pop(holder.access_token_hash, None)
            self._notify(holder, None)

    def _notify(self, old: Route | None, new: Route | None) -> None:
        for listener in self._listeners:
            listener(old, new)

    def _clean(self) -> None:
        now = self._clock.monotonic()
        if now - self._cleaned_at < _CLEANING_SECONDS:
            return
        self._cleaned_at = now
        for key in [key for key, tombstone in self._tombstones.items() if tombstone.until <= now]:
            del self._tombstones[key]
        for sandbox_id in [item for item, until in self._ended.items() if until <= now]:
            del self._ended[sandbox_id]
