"""Limits and options of one gateway process."""

import socket

from msgspec import Struct

KEEPALIVE_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
)
"""Options of the listening sockets, inherited by their connections. Without them a client that
vanished without closing would keep an idle stream open, and its sandbox awake, for ever."""


class GatewayLimits(Struct, frozen=True, kw_only=True):
    """Limits of one gateway process."""

    connections: int = 20_000
    """At the limit, connections without a request are closed, the oldest first."""
    connections_reserved: int = 500
    """On top of `connections`, for authenticated requests, if all connections are in use."""
    connections_per_address: int = 10_000
    """0: no limit. Connections of trusted proxies do not count."""
    descriptors: int = 1 << 20
    """The number of file descriptors that the process can open."""
    requests_per_sandbox: int = 2_000
    requests_reserved: int = 200
    """On top of `requests_per_sandbox`, for requests with the sandbox's own token: many requests to
    a public port do not lock its owner out."""
    held_requests: int = 1_000
    held_requests_per_sandbox: int = 256
    held_bytes: int = 32 * 1024 * 1024
    connect_seconds: float = 5.0
    first_byte_seconds: float = 15.0
    """From a new connection to the first byte of its first request."""
    head_seconds: float = 30.0
    """From the first byte of a request head to its last."""
    idle_seconds: float = 620.0
    """Between a client's requests."""
    upstream_idle_seconds: float = 60.0
    pause_grace_seconds: float = 1.0
    """A request younger than this, when its sandbox is paused, is held until the sandbox runs
    again."""
    boot_seconds: float = 10.0
    """How long a request waits for a closed port of a sandbox that was rebooted."""


class GatewayOptions(Struct, frozen=True, kw_only=True):
    """Options of one gateway process."""

    wakes: bool = True
    """Whether traffic wakes paused sandboxes that have wake-on-traffic enabled."""
    trusts_forwarded: bool = False
    """Whether `X-Forwarded-*` headers of a proxy in front are kept."""
    logs_requests: bool = False
