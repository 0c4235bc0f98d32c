"""What one gateway process may hold, and how long it waits."""

import socket

from msgspec import Struct

KEEPALIVE_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
)
"""Options of sockets that clients connect to, handed on to their connections: one that vanished
without a word would hold an idle stream open for ever, and its sandbox awake."""


class GatewayLimits(Struct, frozen=True, kw_only=True):
    """Bounds of one gateway process."""

    connections: int = 20_000
    requests_per_sandbox: int = 2_000
    requests_reserved: int = 200
    """Beyond these, for whoever shows the sandbox's own token: a crowd at a public port does not
    shut its owner out."""
    held_requests: int = 1_000
    held_requests_per_sandbox: int = 256
    held_bytes: int = 32 * 1024 * 1024
    connect_seconds: float = 5.0
    head_seconds: float = 30.0
    """From a head's first byte to its last."""
    idle_seconds: float = 620.0
    """Between a client's requests."""
    upstream_idle_seconds: float = 60.0
    pause_grace_seconds: float = 1.0
    """A request this young, when its sandbox is paused under it, is carried over the pause."""


class GatewayOptions(Struct, frozen=True, kw_only=True):
    """Choices of one gateway process."""

    wakes: bool = True
    """Whether traffic wakes paused sandboxes that ask for it."""
    trusts_forwarded: bool = False
    """Keep what a proxy in front says of the client."""
    logs_requests: bool = False
