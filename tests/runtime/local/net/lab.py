"""A small internet on this machine: a "host" and an "internet" network namespace.

The fabric under test runs inside the host namespace; nothing outside the lab is changed. The
internet namespace has public and private addresses, and a name server.
"""

import asyncio
import contextlib
import errno
import os
import socket
import struct
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from paddock.runtime.local.net import netns
from paddock.runtime.local.net.fabric import Attachment, Fabric, FabricSettings
from paddock.runtime.port import EgressPolicy

HOST_PUBLIC = "203.0.113.2"
HOST_LAN = "192.168.77.1"
HOST_SECOND = "198.51.100.200"
HOST_V6 = "2001:db8::2"
WEB = "198.51.100.10"
OTHER_WEB = "198.51.100.20"
NAME_SERVER = "203.0.113.53"
SECOND_NAME_SERVER = "203.0.113.54"
PRIVATE_WEB = "10.50.0.1"
CARRIER_WEB = "100.64.0.1"
METADATA = "169.254.169.254"
PORT = 8080
TIMEOUT = 30.0
"""Seconds for what happens at once, unless the machine is overloaded."""

OPEN, CLOSED = EgressPolicy(), EgressPolicy(allow_internet=False)


class Sandbox:
    """A namespace attached to the fabric."""

    def __init__(self, uid: str, netns_fd: int) -> None:
        self.uid = uid
        self.netns_fd = netns_fd
        self.attachment: Attachment

    @property
    def ip(self) -> str:
        return self.attachment.ip

    async def connect(self, address: str, port: int = PORT) -> socket.socket:
        return await connect(self.netns_fd, address, port)

    async def outcome(self, address: str, port: int = PORT, *, seconds: float = TIMEOUT) -> str:
        """Connect and echo once; return `open`, or the name of the error."""
        return await outcome(self.netns_fd, address, port, seconds=seconds)

    async def resolve(
        self, name: str, *, server: str | None = None, kind: int = 1, by_tcp: bool = False
    ) -> "Reply":
        return await resolve(
            self.netns_fd, name, server=server or self.attachment.gateway, kind=kind, by_tcp=by_tcp
        )


class Lab:
    """The host and internet namespaces, and the servers running in them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.stack = contextlib.AsyncExitStack()
        self.host = self._netns()
        self.internet = self._netns()
        self.fabric: Fabric
        self.names = NameServer()
        self._sandboxes = 0

    def _netns(self) -> int:
        fd = netns.create()
        self.stack.callback(os.close, fd)
        return fd

    def run(self, netns_fd: int, script: str) -> str:
        with netns.entered(netns_fd):
            done = subprocess.run(
                ["sh", "-ec", script], capture_output=True, text=True, check=False
            )
        assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"
        return done.stdout

    def build(self) -> None:
        with netns.entered(self.host):
            pid_path = f"/proc/{os.getpid()}/fd/{self.internet}"
            subprocess.run(["ip", "link", "add", "up0", "type", "veth", "peer", "net0"], check=True)
            # `ip` accepts the path of any namespace file, such as our descriptor.
            subprocess.run(["ip", "link", "set", "net0", "netns", pid_path], check=True)
        internet = [WEB, OTHER_WEB, NAME_SERVER, SECOND_NAME_SERVER]
        internet += [PRIVATE_WEB, CARRIER_WEB, METADATA]
        self.run(
            self.internet,
            "ip link set lo up; ip link set net0 up; ip addr add 203.0.113.1/24 dev net0\n"
            + "\n".join(f"ip addr add {one}/32 dev lo" for one in internet),
        )
        self.run(
            self.host,
            f"ip link set lo up; ip addr add {HOST_PUBLIC}/24 dev up0\n"
            f"ip addr add {HOST_LAN}/24 dev up0; ip addr add {HOST_SECOND}/32 dev lo\n"
            f"ip -6 addr add {HOST_V6}/64 dev up0 nodad\n"
            "ip link set up0 up; ip route add default via 203.0.113.1",
        )
        (self.directory / "resolv.conf").write_text(f"nameserver {NAME_SERVER}\n")

    def settings(self, **changes: object) -> FabricSettings:
        chosen: dict[str, object] = {
            "state_directory": str(self.directory / "net"),
            "resolv_conf": str(self.directory / "resolv.conf"),
            **changes,
        }
        return FabricSettings(**chosen)  # pyright: ignore[reportArgumentType]

    async def open(self, **changes: object) -> Fabric:
        self.fabric = await Fabric.open(self.settings(**changes), netns_fd=self.host)
        return self.fabric

    async def start(self, **changes: object) -> None:
        self.build()
        for address in (WEB, OTHER_WEB, PRIVATE_WEB, CARRIER_WEB, METADATA):
            await self.echo_server(self.internet, address)
        await self.name_server(NAME_SERVER, self.names)
        await self.open(**changes)

    async def stop(self) -> None:
        if hasattr(self, "fabric"):
            await self.fabric.close()
        await self.stack.aclose()

    async def sandbox(
        self, policy: EgressPolicy | None = None, *, uid: str | None = None
    ) -> Sandbox:
        self._sandboxes += 1
        made = Sandbox(uid or f"box-{self._sandboxes}", self._netns())
        made.attachment = await self.fabric.attach(made.uid, made.netns_fd, policy=policy)
        return made

    async def echo_server(self, netns_fd: int, address: str, port: int = PORT) -> None:
        """Start an echo server for TCP and UDP."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = netns.socket_in(netns_fd, family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        writers: set[asyncio.StreamWriter] = set()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writers.add(writer)
            with contextlib.suppress(OSError):
                while data := await reader.read(4096):
                    writer.write(data)
                    await writer.drain()
            writer.close()
            writers.discard(writer)

        server = await asyncio.start_server(serve, sock=listener)

        async def stop() -> None:
            server.close()
            for writer in list(writers):
                writer.close()
            await asyncio.sleep(0)

        self.stack.push_async_callback(stop)
        await self.datagrams(
            netns_fd, address, port, lambda transport, data, sender: transport.sendto(data, sender)
        )

    async def datagrams(
        self,
        netns_fd: int,
        address: str,
        port: int,
        received: Callable[[asyncio.DatagramTransport, bytes, tuple[str, int]], None],
    ) -> asyncio.DatagramTransport:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        one = netns.socket_in(netns_fd, family, socket.SOCK_DGRAM)
        one.setblocking(False)
        one.bind((address, port))

        class Protocol(asyncio.DatagramProtocol):
            def connection_made(self, transport: asyncio.DatagramTransport) -> None:
                self.transport = transport

            def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
                received(self.transport, data, addr)

        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(Protocol, sock=one)
        self.stack.callback(transport.close)
        return transport

    async def name_server(self, address: str, names: "NameServer") -> None:
        def received(
            transport: asyncio.DatagramTransport, data: bytes, sender: tuple[str, int]
        ) -> None:
            reply = names.reply(data, by_tcp=False)
            if reply is not None:
                transport.sendto(reply, sender)

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(asyncio.IncompleteReadError, OSError):
                (size,) = struct.unpack("!H", await reader.readexactly(2))
                reply = names.reply(await reader.readexactly(size), by_tcp=True)
                assert reply is not None
                writer.write(struct.pack("!H", len(reply)) + reply)
            writer.close()

        await self.datagrams(self.internet, address, 53, received)
        listener = netns.socket_in(self.internet, socket.AF_INET, socket.SOCK_STREAM)
        listener.bind((address, 53))
        server = await asyncio.start_server(serve, sock=listener)
        self.stack.callback(server.close)


class NameServer:
    """A name server that answers from a table and records queries."""

    def __init__(self) -> None:
        self.addresses: dict[str, list[str]] = {}
        self.aliases: dict[str, str] = {}
        self.ttl = 60
        self.queries: list[str] = []
        self.is_silent = False
        self.truncates = False

    def reply(self, data: bytes, *, by_tcp: bool) -> bytes | None:
        identity, flags = struct.unpack_from("!HH", data)
        name, end = read_name(data, 12)
        (kind,) = struct.unpack_from("!H", data, end)
        question = data[12 : end + 4]
        self.queries.append(name)
        if self.is_silent:
            return None
        flags = 0x8180
        if self.truncates and not by_tcp:
            return struct.pack("!HHHHHH", identity, flags | 0x0200, 1, 0, 0, 0) + question
        records: list[bytes] = []
        while name in self.aliases:
            target = write_name(self.aliases[name])
            records.append(write_name(name) + struct.pack("!HHIH", 5, 1, self.ttl, len(target)))
            records[-1] += target
            name = self.aliases[name]
        if kind == 1:
            for address in self.addresses.get(name, []):
                head = struct.pack("!HHIH", 1, 1, self.ttl, 4)
                records.append(write_name(name) + head + socket.inet_aton(address))
        code = 0 if name in self.addresses else 3
        head = struct.pack("!HHHHHH", identity, flags | code, 1, len(records), 0, 0)
        return head + question + b"".join(records)


class Reply:
    """A reply of a resolver, parsed independently of the code under test."""

    def __init__(self, data: bytes) -> None:
        self.identity, flags, _, count, _, self.extras = struct.unpack_from("!HHHHHH", data)
        self.code = flags & 0xF
        self.is_truncated = bool(flags & 0x0200)
        self.raw = data
        _, at = read_name(data, 12)
        at += 4
        self.addresses: list[str] = []
        for _ in range(count):
            _, at = read_name(data, at)
            kind, _, _, length = struct.unpack_from("!HHIH", data, at)
            at += 10
            if kind == 1:
                self.addresses.append(socket.inet_ntoa(data[at : at + 4]))
            at += length


def write_name(name: str) -> bytes:
    labels = [label.encode() for label in name.split(".") if label]
    return b"".join(bytes([len(label)]) + label for label in labels) + b"\0"


def read_name(data: bytes, at: int) -> tuple[str, int]:
    labels: list[str] = []
    while data[at]:
        if data[at] >= 0xC0:  # a pointer ends a name
            return ".".join((*labels, read_name(data, data[at + 1])[0])), at + 2
        assert data[at] < 64
        labels.append(data[at + 1 : at + 1 + data[at]].decode().lower())
        at += data[at] + 1
    return ".".join(labels), at + 1


def question(name: str, kind: int = 1, identity: int = 0x1234) -> bytes:
    head = struct.pack("!HHHHHH", identity, 0x0100, 1, 0, 0, 0)
    return head + write_name(name) + struct.pack("!HH", kind, 1)


async def resolve(
    netns_fd: int, name: str, *, server: str, kind: int = 1, by_tcp: bool = False
) -> Reply:
    loop = asyncio.get_running_loop()
    data = question(name, kind)
    shape = socket.SOCK_STREAM if by_tcp else socket.SOCK_DGRAM
    with netns.socket_in(netns_fd, socket.AF_INET, shape) as one:
        one.setblocking(False)
        async with asyncio.timeout(TIMEOUT):
            await loop.sock_connect(one, (server, 53))
            if not by_tcp:
                await loop.sock_sendall(one, data)
                return Reply(await loop.sock_recv(one, 65535))
            await loop.sock_sendall(one, struct.pack("!H", len(data)) + data)
            received = b""
            while len(received) < 2 or len(received) < 2 + int.from_bytes(received[:2], "big"):
                part = await loop.sock_recv(one, 65535)
                assert part, "the resolver closed the connection"
                received += part
            return Reply(received[2:])


async def connect(
    netns_fd: int, address: str, port: int = PORT, *, seconds: float = TIMEOUT
) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    one = netns.socket_in(netns_fd, family, socket.SOCK_STREAM)
    one.setblocking(False)
    try:
        async with asyncio.timeout(seconds):
            await asyncio.get_running_loop().sock_connect(one, (address, port))
    except BaseException:
        one.close()
        raise
    return one


async def echo(one: socket.socket, data: bytes = b"hello") -> bytes:
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(TIMEOUT):
        await loop.sock_sendall(one, data)
        return await loop.sock_recv(one, 4096)


async def outcome(
    netns_fd: int, address: str, port: int = PORT, *, seconds: float = TIMEOUT
) -> str:
    """Connect and echo once; return `open`, or the name of the error."""
    try:
        with await connect(netns_fd, address, port, seconds=seconds) as one:
            return "open" if await echo(one) == b"hello" else "silent"
    except TimeoutError:
        return "timeout"
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error))


async def udp_outcome(
    netns_fd: int,
    address: str,
    port: int = PORT,
    *,
    source: str = "",
    source_port: int = 0,
    seconds: float = 0.2,
) -> str:
    """Send a datagram; return whether it is echoed in time."""
    loop = asyncio.get_running_loop()
    with netns.socket_in(netns_fd, socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.setblocking(False)
        if source or source_port:
            one.bind((source, source_port))
        try:
            one.connect((address, port))
            async with asyncio.timeout(seconds):
                await loop.sock_sendall(one, b"hello")
                await loop.sock_recv(one, 4096)
        except TimeoutError:
            return "timeout"
        except OSError as error:
            return errno.errorcode.get(error.errno or 0, str(error))
        return "open"


async def eventually(wanted: Callable[[], object], *, seconds: float = 30) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(seconds):
        while True:
            found = wanted()
            if asyncio.iscoroutine(found):
                found = await found
            if found:
                return
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def running_lab(directory: Path, **settings: object) -> AsyncIterator[Lab]:
    lab = Lab(directory)
    try:
        await lab.start(**settings)
        yield lab
    finally:
        await lab.stop()
