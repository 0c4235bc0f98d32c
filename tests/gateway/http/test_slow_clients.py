"""Clients that send much and read little: the gateway's memory stays bounded."""

import asyncio
import socket
from collections.abc import Callable

import pytest

from paddock.app.roles.gateway import _listen
from paddock.gateway.http import client as client_module
from paddock.gateway.http.client import ClientConnection
from paddock.gateway.limits import GatewayLimits
from paddock.settings import Settings
from tests.gateway.rig import OK, PATIENCE_SECONDS, Rig, get, read_request, rig
from tests.runtime.local.nodes import eventually

REFUSED = get("/kruise/abc/0/")
MANY = 400_000
"""More requests than fit in all buffers."""
HELD_BYTES = 1_000_000


class Flood:
    """A client that sends requests without end and reads nothing."""

    def __init__(self, paddock: Rig, request: bytes) -> None:
        self._paddock = paddock
        self._request = request
        self._unsent = b""
        self.requests = 0
        self.socket = socket.socket()
        for buffer in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            self.socket.setsockopt(socket.SOL_SOCKET, buffer, 32_768)
        self.socket.setblocking(False)

    async def open(self) -> ClientConnection:
        loop = asyncio.get_running_loop()
        await loop.sock_connect(self.socket, ("127.0.0.1", self._paddock.port))
        await eventually(lambda: self._paddock.gateway.clients)
        (served,) = self._paddock.gateway.clients
        return served

    def send(self) -> None:
        """Send as much as the socket accepts now."""
        while self.requests < MANY:
            if not self._unsent:
                self._unsent = self._request * 100
                self.requests += 100
            try:
                sent = self.socket.send(self._unsent)
            except BlockingIOError:
                return
            self._unsent = self._unsent[sent:]

    async def until(self, is_so: Callable[[], object]) -> None:
        """Send until a condition holds."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not is_so():
                self.send()
                assert self.requests < MANY, "everything was taken"
                await asyncio.sleep(0)

    async def read_all(self) -> bytes:
        """Send the rest of the current request, half-close, and read everything."""
        loop = asyncio.get_running_loop()
        sending = asyncio.create_task(loop.sock_sendall(self.socket, self._unsent))
        sending.add_done_callback(lambda _: self.socket.shutdown(socket.SHUT_WR))
        responses = bytearray()
        async with asyncio.timeout(PATIENCE_SECONDS):
            while piece := await loop.sock_recv(self.socket, 1 << 20):
                responses += piece
        await sending
        return bytes(responses)


def held(served: ClientConnection) -> int:
    assert served._transport is not None
    return served._transport.get_write_buffer_size() + len(served._buffer)


@pytest.mark.parametrize("request_", [REFUSED, get()], ids=["refused", "answered"])
async def test_unread_responses_are_not_buffered_and_none_is_lost(request_: bytes) -> None:
    async def serve(reader, writer) -> None:
        while True:
            await read_request(reader)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 3000\r\n\r\n" + b"x" * 3000)

    async with rig() as paddock:
        await paddock.upstream(serve)
        flood = Flood(paddock, request_)
        served = await flood.open()
        await flood.until(lambda: served._is_write_paused and served.pauses)
        assert held(served) < HELD_BYTES
        responses = await flood.read_all()
        flood.socket.close()
    assert responses.count(b"HTTP/1.1 ") == flood.requests


async def test_the_pipeline_buffer_does_not_grow_with_each_response() -> None:
    answered = asyncio.Semaphore(0)

    async def serve(reader, writer) -> None:
        while True:
            await read_request(reader)
            await answered.acquire()
            writer.write(OK)

    async with rig() as paddock:
        await paddock.upstream(serve)
        flood = Flood(paddock, get())
        served = await flood.open()
        traffic = paddock.activity.get_or_create("uid-abc", "abc")
        for number in range(20):
            await flood.until(lambda: served.pauses)
            assert held(served) < HELD_BYTES
            answered.release()
            await eventually(lambda count=number: traffic.requests > count + 1)
        flood.socket.close()


async def test_a_client_that_never_reads_is_closed_eventually() -> None:
    async with rig(GatewayLimits(idle_seconds=0.01)) as paddock:
        flood = Flood(paddock, REFUSED)
        served = await flood.open()
        await flood.until(lambda: served._is_write_paused)

        def gone() -> bool:
            paddock.gateway.sweep()
            return not paddock.gateway.clients

        await eventually(gone)
        flood.socket.close()


async def test_a_half_closed_client_that_reads_late_gets_the_whole_response(monkeypatch) -> None:
    monkeypatch.setattr(client_module, "HALF_CLOSED_SECONDS", 0.05)
    piece = b"~" * 50_000

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        exchange = served._exchange
        assert exchange is not None
        # More than the kernel buffers for a client that reads nothing.
        while not held(served) and len(sent) < 1000:
            writer.write(piece)
            sent.append(piece)
            await eventually(lambda: exchange.response_bytes >= len(sent) * len(piece), pause=0)
        writer.close()

    sent: list[bytes] = []
    async with rig() as paddock:
        await paddock.upstream(serve)
        flood = Flood(paddock, get(connection="close"))
        served = await flood.open()
        flood.socket.send(get(connection="close"))
        flood.socket.shutdown(socket.SHUT_WR)
        await eventually(lambda: served.is_closing and held(served))
        timer = served._timer
        await eventually(lambda: served._timer is not timer)
        response = await flood.read_all()
        flood.socket.close()
    assert response.count(b"~") == len(sent) * len(piece)
    assert not paddock.gateway.clients


async def test_a_client_that_vanished_without_closing_is_noticed() -> None:
    async with rig() as paddock:
        (server,) = await _listen(Settings(port=0), paddock.gateway)
        at = server.sockets[0].getsockname()
        _, writer = await asyncio.open_connection(*at)
        await eventually(lambda: paddock.gateway.clients)
        (served,) = paddock.gateway.clients
        assert served._transport is not None
        opened = served._transport.get_extra_info("socket")
        assert opened.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 60
        writer.close()
        server.close()


async def test_a_refused_head_has_no_head_timeout() -> None:
    async with rig(GatewayLimits(head_seconds=0.0)) as paddock:
        wire = await paddock.connect()
        wire.send(b"GET / HTTP/1.1\r\nx: y")
        await eventually(lambda: any(c.head_since for c in paddock.gateway.clients))
        wire.send(b"z" * 70_000)
        status, _, _ = await wire.head()
        paddock.gateway.sweep()
        assert status == 431
        await wire.close()


async def test_many_empty_lines_are_skipped_at_once() -> None:
    async with rig() as paddock:
        wire = await paddock.connect()
        await eventually(lambda: paddock.gateway.clients)
        (served,) = paddock.gateway.clients
        # Copying line by line would take many minutes.
        served.data_received(b"\r\n" * 2_000_000 + REFUSED)
        assert (await wire.response()).status == 400
        await wire.close()
