"""The resolver of sandboxes: a forwarder on the gateway's address that enforces egress policies.

A query is parsed, checked, rewritten and sent to the host's name servers or to those of the policy.
If a policy allows domains, the firewall admits the addresses of an answer before the answer is
sent, for the TTL of the answer. A name that the policy does not allow is refused without an
upstream query, so that no data leaks through DNS.

Clients are identified by source address; the firewall drops spoofed packets. The number of queries
in flight and of admitted addresses is limited per sandbox, so one sandbox cannot starve others.
"""

import asyncio
import logging
import socket
import struct
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from ipaddress import IPv4Address, IPv4Network

from msgspec import Struct

from paddock.kit.logs import fields
from paddock.runtime.local.net.dns import messages as wire
from paddock.runtime.local.net.dns.upstream import NoServerError, UpstreamResolver
from paddock.runtime.local.net.policy import EgressRules, is_admissible

log = logging.getLogger(__name__)

_MAX_QUERY = 1024
_OWN_TTL_SECONDS = 60


class ResolverSettings(Struct, frozen=True, kw_only=True):
    """Limits of the resolver."""

    max_open_per_sandbox: int = 64
    max_open: int = 2048
    max_connections_per_sandbox: int = 8
    idle_seconds: float = 10.0
    """Idle timeout of a TCP connection."""


Admit = Callable[[str, str, Sequence[tuple[IPv4Address, int]]], Awaitable[None]]
"""Admits the addresses of a name for a sandbox: (sandbox ip, name, ((address, ttl), …))."""


class Resolver:
    """The DNS server of the fabric."""

    def __init__(
        self,
        *,
        rules_of: Callable[[str], EgressRules | None],
        admit: Admit,
        host_servers: Callable[[], Sequence[str]],
        upstream: UpstreamResolver,
        settings: ResolverSettings,
        own_names: Mapping[str, IPv4Address] | None = None,
        private_networks: tuple[IPv4Network, ...] = (),
    ) -> None:
        """`own_names` are answered here and not forwarded."""
        self._rules_of = rules_of
        self._admit = admit
        self._host_servers = host_servers
        self._upstream = upstream
        self._settings = settings
        self._own_names = own_names or {}
        self._private_networks = private_networks
        self._open: Counter[str] = Counter()
        self._connections: Counter[str] = Counter()
        self.is_serving = asyncio.Event()
        self._tasks: asyncio.TaskGroup | None = None
        self._transport: asyncio.DatagramTransport | None = None

    async def run(self, datagrams: socket.socket, listener: socket.socket) -> None:
        """Serve until cancelled, on bound sockets that the caller owns."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            transport, _ = await loop.create_datagram_endpoint(
                lambda: _Datagrams(self._datagram), sock=datagrams
            )
            self._transport = transport
            server = await asyncio.start_server(self._connected, sock=listener)
            self.is_serving.set()
            try:
                await loop.create_future()  # Until cancelled.
            finally:
                transport.close()
                server.close()

    def _datagram(self, data: bytes, ip: str, port: int) -> None:
        tasks = self._tasks
        if tasks is None or self._rules_of(ip) is None:
            return
        if not self._has_room(ip):
            self._send(_servfail(data), ip, port)
            return
        tasks.create_task(self._serve_datagram(data, ip, port), name=f"resolve for {ip}")

    async def _serve_datagram(self, data: bytes, ip: str, port: int) -> None:
        self._send(await self._answer(data, ip, by_tcp=False), ip, port)

    def _send(self, reply: bytes | None, ip: str, port: int) -> None:
        if reply is not None and self._transport is not None and not self._transport.is_closing():
            self._transport.sendto(reply, (ip, port))

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ip = writer.get_extra_info("peername")[0]
        if (
            self._tasks is None
            or self._rules_of(ip) is None
            or self._connections[ip] >= self._settings.max_connections_per_sandbox
        ):
            writer.close()
            return
        self._connections[ip] += 1
        self._tasks.create_task(
            self._serve_connection(reader, writer, ip), name=f"resolve by TCP for {ip}"
        )

    async def _serve_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, ip: str
    ) -> None:
        try:
            while True:
                async with asyncio.timeout(self._settings.idle_seconds):
                    (size,) = struct.unpack("!H", await reader.readexactly(2))
                    if size > _MAX_QUERY:
                        return
                    data = await reader.readexactly(size)
                if self._rules_of(ip) is None:
                    return
                reply = (
                    await self._answer(data, ip, by_tcp=True)
                    if self._has_room(ip)
                    else _servfail(data)
                )
                if reply is None:
                    return
                writer.write(struct.pack("!H", len(reply)) + reply)
                async with asyncio.timeout(self._settings.idle_seconds):
                    await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            _decrement(self._connections, ip)
            writer.close()

    def _has_room(self, ip: str) -> bool:
        settings = self._settings
        return self._open[ip] < settings.max_open_per_sandbox and (
            self._open.total() < settings.max_open
        )

    async def _answer(self, data: bytes, ip: str, *, by_tcp: bool) -> bytes | None:
        self._open[ip] += 1
        try:
            if len(data) > _MAX_QUERY:
                return wire.header_only_failure(data, wire.FORMERR)
            query = wire.parse_query(data)
            return await self._resolve(query, ip, by_tcp=by_tcp)
        except wire.UnsupportedQueryError:
            return wire.header_only_failure(data, wire.NOTIMP)
        except wire.MalformedError:
            return wire.header_only_failure(data, wire.FORMERR)
        except Exception:
            # Top of the client's task: this query fails, the resolver continues.
            log.exception("DNS query failed", extra=fields(sandbox_ip=ip))
            return wire.header_only_failure(data, wire.SERVFAIL)
        finally:
            _decrement(self._open, ip)

    async def _resolve(self, query: wire.DnsQuery, ip: str, *, by_tcp: bool) -> bytes | None:
        rules = self._rules_of(ip)
        if rules is None:
            return None
        if not query.is_internet or query.type in (wire.TYPE_AXFR, wire.TYPE_IXFR):
            return wire.failure(query, wire.NOTIMP)
        if not rules.resolves(query.name):
            return wire.failure(
                query, wire.REFUSED, extended=wire.PROHIBITED, text="egress policy of this sandbox"
            )
        if (own := self._own_names.get(query.name)) is not None:
            if rules.admits_answers:
                await self._admit(ip, query.name, [(own, _OWN_TTL_SECONDS)])
            return wire.own_answer(query, own, _OWN_TTL_SECONDS)
        try:
            servers = rules.dns_servers or self._host_servers()
            raw, answer = await self._upstream.query(query, servers, by_tcp=by_tcp)
        except NoServerError as error:
            log.info(
                "upstream name servers did not answer",
                extra=fields(sandbox_ip=ip, error=str(error)),
            )
            return wire.failure(query, wire.SERVFAIL)
        if rules.admits_answers and answer.addresses:
            # The policy may have changed during the upstream query: use the current one.
            rules = self._rules_of(ip)
            if rules is None or not rules.resolves(query.name):
                return wire.failure(query, wire.REFUSED)
            reaches_private = rules.reaches_private
            await self._admit(
                ip,
                query.name,
                [
                    (address, ttl)
                    for address, ttl in answer.addresses
                    if is_admissible(
                        address,
                        reaches_private=reaches_private,
                        private_networks=self._private_networks,
                    )
                ],
            )
        if not by_tcp and len(raw) > (query.udp_size or 512):
            return wire.truncated(query)
        return wire.reply_from(raw, query)


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, received: Callable[[bytes, str, int], None]) -> None:
        self._received = received

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self._received(data, addr[0], addr[1])


def _servfail(data: bytes) -> bytes | None:
    return wire.header_only_failure(data, wire.SERVFAIL)


def _decrement(counter: Counter[str], key: str) -> None:
    counter[key] -= 1
    if counter[key] <= 0:
        del counter[key]
