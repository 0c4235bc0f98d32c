"""Query upstream name servers on behalf of sandboxes, by UDP and TCP.

A reply is accepted only if it comes from the queried server, has the random id of the query and
repeats the question. `server` enforces policies.
"""

import asyncio
import contextlib
import secrets
import socket
import struct
from collections.abc import AsyncGenerator, Sequence
from ipaddress import ip_address

from paddock.kit.errors import PaddockError
from paddock.runtime.local.net.dns import messages as wire
from paddock.runtime.local.net.netns import socket_in

_ATTEMPTS = 3
_ATTEMPT_SECONDS = 2.0
"""Timeout of one server before the next one is queried."""
_MAX_ANSWER = 65535


class NoServerError(PaddockError):
    """No server returned a usable answer."""

    reason = "NameServersUnreachable"


class UpstreamResolver:
    """Queries name servers from one network namespace."""

    def __init__(self, netns_fd: int | None) -> None:
        self._netns_fd = netns_fd

    async def query(
        self, query: wire.DnsQuery, servers: Sequence[str], *, by_tcp: bool
    ) -> tuple[bytes, wire.DnsAnswer]:
        """Query the servers in order; return the first usable reply, raw and parsed."""
        if not servers:
            raise NoServerError("this machine has no name servers in /etc/resolv.conf")
        exchange = self._exchange_tcp if by_tcp else self._exchange_udp
        problem = ""
        for attempt in range(max(_ATTEMPTS, min(len(servers), _ATTEMPTS + 1))):
            server = servers[attempt % len(servers)]
            try:
                async with asyncio.timeout(_ATTEMPT_SECONDS):
                    return await exchange(query, server)
            except (TimeoutError, OSError, EOFError, wire.MalformedError) as error:
                problem = f"{server}: {error or type(error).__name__}"
        raise NoServerError(problem)

    async def _exchange_udp(
        self, query: wire.DnsQuery, server: str
    ) -> tuple[bytes, wire.DnsAnswer]:
        # One socket per query: an attacker has to guess its random port and id.
        identity = secrets.randbits(16)
        replies: asyncio.Queue[bytes | OSError] = asyncio.Queue(maxsize=16)
        with self._socket(server, socket.SOCK_DGRAM) as connection:
            connection.connect((server, 53))
            transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
                lambda: _Replies(replies), sock=connection
            )
            try:
                transport.sendto(wire.upstream_query(query, identity))
                while True:
                    raw = await replies.get()
                    if isinstance(raw, OSError):
                        raise raw
                    with contextlib.suppress(wire.MalformedError):
                        return raw, wire.parse_answer(raw, query, identity)
            finally:
                transport.close()

    async def _exchange_tcp(
        self, query: wire.DnsQuery, server: str
    ) -> tuple[bytes, wire.DnsAnswer]:
        identity = secrets.randbits(16)
        with self._socket(server, socket.SOCK_STREAM) as connection:
            await asyncio.get_running_loop().sock_connect(connection, (server, 53))
            async with _streams(connection) as (reader, writer):
                message = wire.upstream_query(query, identity)
                writer.write(struct.pack("!H", len(message)) + message)
                (size,) = struct.unpack("!H", await reader.readexactly(2))
                raw = await reader.readexactly(size)
                return raw, wire.parse_answer(raw, query, identity)

    def _socket(self, server: str, kind: socket.SocketKind) -> socket.socket:
        family = socket.AF_INET if ip_address(server).version == 4 else socket.AF_INET6
        connection = socket_in(self._netns_fd, family, kind)
        connection.setblocking(False)
        return connection


def host_servers(path: str = "/etc/resolv.conf") -> tuple[str, ...]:
    """Return the host's name servers; ignore an unreadable file and invalid lines."""
    found: list[str] = []
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = file.read(65536).splitlines()
    except OSError:
        return ()
    for line in lines:
        parts = line.split()
        if len(parts) >= 2 and parts[0] == "nameserver":
            with contextlib.suppress(ValueError):
                ip_address(parts[1])
                found.append(parts[1])
    return tuple(found)


class _Replies(asyncio.DatagramProtocol):
    def __init__(self, replies: asyncio.Queue[bytes | OSError]) -> None:
        self._replies = replies

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self._put(data)

    def error_received(self, exc: Exception) -> None:
        self._put(exc if isinstance(exc, OSError) else OSError(str(exc)))

    def _put(self, what: bytes | OSError) -> None:
        # A flood of forged replies fills the queue and is dropped; the query then times out.
        with contextlib.suppress(asyncio.QueueFull):
            self._replies.put_nowait(what)


@contextlib.asynccontextmanager
async def _streams(
    connection: socket.socket,
) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(sock=connection, limit=_MAX_ANSWER + 2)
    try:
        yield reader, writer
    finally:
        writer.close()
