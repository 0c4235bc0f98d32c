"""Broken or slow clients and sandboxes, and overload: errors are reported, memory is bounded."""

import asyncio
import time

import pytest

from paddock.gateway.limits import GatewayLimits
from tests.gateway.rig import (
    OK,
    PATIENCE_SECONDS,
    SEED,
    get,
    read_request,
    recording,
    replying,
    rig,
)
from tests.runtime.local.nodes import eventually


async def test_a_sandbox_that_aborts_mid_body_aborts_the_client_too() -> None:
    async def serve(reader, writer) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
        await writer.drain()
        writer.transport.abort()

    async with rig() as paddock:
        await paddock.upstream(serve)
        wire = await paddock.connect()
        wire.send(get())
        with pytest.raises(ConnectionResetError):
            await wire.rest()
        await wire.close()


async def test_a_clean_close_in_the_middle_of_a_body_is_an_error() -> None:
    async def serve(reader, writer) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhello")
        await writer.drain()

    async with rig() as paddock:
        await paddock.upstream(serve)
        wire = await paddock.connect()
        wire.send(get())
        with pytest.raises(ConnectionResetError):
            await wire.rest()
        await wire.close()


@pytest.mark.parametrize(
    "response",
    [
        b"",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nBad Header: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000 + b"\r\n\r\n",
        b"HTTP/1.1 999999 OK\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
    ],
)
async def test_an_ambiguous_response_is_a_502(response: bytes) -> None:
    async def serve(reader, writer) -> None:
        await read_request(reader)
        writer.write(response)
        await writer.drain()

    async with rig() as paddock:
        await paddock.upstream(serve)
        assert (await paddock.get()).status == 502


async def test_a_connection_closed_right_after_accept_is_a_502() -> None:
    async with rig() as paddock:
        await paddock.upstream(OK)
        dial = paddock.dialer.dial

        async def closed_meanwhile(*wanted):
            connection = await dial(*wanted)
            connection.abort()
            await eventually(lambda: connection._transport is None)
            return connection

        paddock.dialer.dial = closed_meanwhile
        response = await paddock.get()
        assert response.status == 502
        assert b"closed the connection" in response.body


async def test_bytes_after_a_response_never_reach_the_next_request() -> None:
    async with rig() as paddock:
        smuggled = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nsecret"
        await paddock.upstream(
            replying(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok" + smuggled)
        )
        wire = await paddock.connect()
        for _ in range(3):
            wire.send(get())
            assert (await wire.response()).body == b"ok"
        await wire.close()
        assert paddock.dialer.dials == 3


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/1.1\r\n" + b"x: " + b"y" * 70_000, 431),
        (b"GET /" + b"y" * 70_000, 431),
        (b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 200 + b"\r\n", 431),
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: a b\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\nhost: a\r\n\r\n", 400),
        (b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n", 405),
        (b"GET / HTTP/1.1\r\nhost: a\r\nexpect: the-unexpected\r\n\r\n", 417),
        (get()[:-2] + b"E2b-Sandbox-Id: other\r\n\r\n", 400),
        (get(e2b_sandbox_port="0"), 400),
        (get(e2b_sandbox_port="x"), 400),
        (get(e2b_sandbox_id="../etc"), 400),
    ],
)
async def test_malformed_requests_are_refused(request_: bytes, status: int) -> None:
    async with rig() as paddock:
        await paddock.upstream(OK)
        response = await paddock.request(request_)
        assert response.status == status
        assert b'"message":' in response.body


async def test_a_bad_chunk_ends_both_sides_and_the_sandbox_sees_no_complete_request() -> None:
    seen = []
    async with rig() as paddock:
        await paddock.upstream(recording(seen))
        wire = await paddock.connect()
        wire.send(get(method="POST", transfer_encoding="chunked") + b"1\r\nx\r\n")
        await eventually(lambda: paddock.dialer.dials == 1)
        wire.send(b"zz\r\n")
        assert (await wire.response()).status == 400
        assert await wire.rest() == b""
        await wire.close()
        assert seen == []


async def test_a_slow_head_times_out() -> None:
    async with rig(GatewayLimits(head_seconds=0.05)) as paddock:
        wire = await paddock.connect()
        wire.send(b"GET / HTTP/1.1\r\nx: y")
        await eventually(lambda: any(c.head_since for c in paddock.gateway.clients))
        wire.send(b"\r\nslow: 1")
        # Unread bytes would turn the close into a reset.
        await eventually(lambda: any(b"slow" in c._buffer for c in paddock.gateway.clients))

        def cut() -> bool:
            paddock.gateway.sweep()
            return not paddock.gateway.clients

        await eventually(cut)
        assert b"408" in await wire.rest()
        await wire.close()


async def test_idle_connections_are_closed_and_busy_ones_are_not() -> None:
    async def serve(reader, writer) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        await reader.read()

    async with rig(GatewayLimits(idle_seconds=0.01)) as paddock:
        await paddock.upstream(serve)
        busy, idle = await paddock.connect(), await paddock.connect()
        busy.send(get())
        assert (await busy.head())[0] == 200

        def only_one() -> bool:
            paddock.gateway.sweep()
            return len(paddock.gateway.clients) == 1

        await eventually(only_one)
        assert await idle.rest() == b""
        paddock.gateway.sweep()
        assert len(paddock.gateway.clients) == 1
        await busy.close()
        await idle.close()


async def test_a_client_disconnect_aborts_its_request_in_the_sandbox() -> None:
    ended = asyncio.Event()

    async def serve(reader, writer) -> None:
        await read_request(reader)
        try:
            await reader.read()
        finally:
            ended.set()

    async with rig() as paddock:
        await paddock.upstream(serve)
        wire = await paddock.connect()
        wire.send(get())
        await eventually(lambda: (t := paddock.activity.get("uid-abc")) and t.in_flight == 1)
        wire.reset()
        await asyncio.wait_for(ended.wait(), PATIENCE_SECONDS)
        assert paddock.activity.statuses == {499: 1}
        assert not any(paddock.gateway._inflight.in_flight.values())


async def test_a_half_closed_client_still_gets_its_response() -> None:
    async def serve(reader, writer) -> None:
        await read_request(reader)
        await asyncio.sleep(0.05)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        await writer.drain()

    async with rig() as paddock:
        await paddock.upstream(serve)
        wire = await paddock.connect()
        wire.send(get())
        wire.writer.write_eof()
        assert (await wire.response()).body == b"ok"
        assert await wire.rest() == b""
        await wire.close()


@pytest.mark.parametrize("direction", ["down", "up"])
async def test_backpressure_keeps_memory_bounded(direction: str) -> None:
    moved = 0
    total = 64_000_000

    async def push(writer) -> None:
        nonlocal moved
        while moved < total:
            writer.write(b"x" * 100_000)
            await writer.drain()
            moved += 100_000

    async def serve(reader, writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if direction == "down":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % total)
            await push(writer)
        else:
            await asyncio.sleep(60)

    async with rig() as paddock:
        await paddock.upstream(serve)
        wire = await paddock.connect()
        sending = None
        if direction == "down":
            wire.send(get())
        else:
            wire.send(get(method="POST", content_length=str(total)))
            sending = asyncio.create_task(push(wire.writer))
        last, since = -1, time.monotonic()

        def stalls() -> bool:
            nonlocal last, since
            if moved != last:
                last, since = moved, time.monotonic()
            return moved > 0 and time.monotonic() - since > 0.5

        await eventually(stalls)
        # At most the kernel buffers of four sockets, our buffers and the reader's limit.
        assert moved < 30_000_000
        for connection in (*paddock.gateway.clients,):
            assert connection._transport.get_write_buffer_size() < 1_000_000
        if sending is not None:
            sending.cancel()
        wire.reset()


async def test_requests_per_sandbox_are_limited() -> None:
    async def serve(reader, writer) -> None:
        await read_request(reader)
        await reader.read()

    async with rig(GatewayLimits(requests_per_sandbox=2)) as paddock:
        await paddock.upstream(serve)
        await paddock.upstream(OK, "xyz")
        wires = [await paddock.connect() for _ in range(2)]
        for wire in wires:
            wire.send(get())
        await eventually(lambda: len(paddock.gateway._inflight.in_flight.get("uid-abc", ())) == 2)
        refused = await paddock.get()
        assert (refused.status, refused.headers["retry-after"]) == (429, "1")
        assert (await paddock.get(e2b_sandbox_id="xyz")).status == 200
        for wire in wires:
            await wire.close()


async def test_public_traffic_does_not_lock_the_owner_out() -> None:
    async def serve(reader, writer) -> None:
        await read_request(reader)
        await reader.read()

    token = SEED.access_token("abc")
    async with rig(GatewayLimits(requests_per_sandbox=2, requests_reserved=1)) as paddock:
        await paddock.upstream(serve)
        await paddock.upstream(OK, port=49983)
        wires = [await paddock.connect() for _ in range(3)]
        for wire in wires[:2]:
            wire.send(get())
        in_flight = paddock.gateway._inflight.in_flight
        await eventually(lambda: len(in_flight.get("uid-abc", ())) == 2)
        assert (await paddock.get("/health", e2b_sandbox_port="49983")).status == 429
        owner = get("/envs", e2b_sandbox_port="49983", x_access_token=token)
        for _ in range(3):
            assert (await paddock.request(owner)).status == 200
        wires[2].send(get(x_access_token=token))
        await eventually(lambda: len(in_flight["uid-abc"]) == 3)
        assert (await paddock.request(owner)).status == 429
        for wire in wires:
            await wire.close()


async def test_connections_above_the_limit_get_a_503() -> None:
    may_respond = asyncio.Event()

    async def serve(reader, writer) -> None:
        while True:
            await read_request(reader)
            await may_respond.wait()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    async with rig(GatewayLimits(connections=1, connections_reserved=0)) as paddock:
        await paddock.upstream(serve)
        first = await paddock.connect()
        first.send(get())
        traffic = paddock.activity.get_or_create("uid-abc", "abc")
        await eventually(lambda: traffic.in_flight)
        second = await paddock.connect()
        assert (await second.response()).status == 503
        await second.close()
        may_respond.set()
        assert (await first.response()).status == 200
        await first.close()
        await eventually(lambda: not paddock.gateway.clients)
        assert (await paddock.get()).status == 200


async def test_a_safe_request_is_retried_when_its_reused_connection_closed() -> None:
    served = 0

    async def serve(reader, writer) -> None:
        nonlocal served
        served += 1
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        await writer.drain()
        if served == 1:
            # Reads the next request and closes without a response.
            await reader.readuntil(b"\r\n\r\n")

    async with rig() as paddock:
        await paddock.upstream(serve)
        wire = await paddock.connect()
        for _ in range(2):
            wire.send(get())
            assert (await wire.response()).body == b"ok"
        await wire.close()
        assert served == 2


async def test_an_unsafe_request_is_never_sent_twice() -> None:
    requests = []

    async def serve(reader, writer) -> None:
        requests.append(await read_request(reader))
        if len(requests) == 1:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            await writer.drain()
            requests.append(await read_request(reader))

    async with rig() as paddock:
        await paddock.upstream(serve)
        wire = await paddock.connect()
        wire.send(get(method="POST", content_length="1") + b"1")
        assert (await wire.response()).status == 200
        wire.send(get(method="POST", content_length="1") + b"2")
        assert (await wire.response()).status == 502
        await wire.close()
        assert [body for _, _, body in requests] == [b"1", b"2"]


async def test_a_stopping_gateway_finishes_requests_in_flight() -> None:
    asked, responses = asyncio.Event(), asyncio.Event()

    async def serve(reader, writer) -> None:
        await read_request(reader)
        asked.set()
        await responses.wait()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        await writer.drain()

    async with rig() as paddock:
        await paddock.upstream(serve)
        busy, idle = await paddock.connect(), await paddock.connect()
        busy.send(get())
        await asked.wait()
        draining = asyncio.create_task(paddock.gateway.clients.drain(PATIENCE_SECONDS))
        assert await idle.rest() == b""
        responses.set()
        assert (await busy.response()).body == b"ok"
        assert await busy.rest() == b""
        await draining
        assert not paddock.gateway.clients
        await busy.close()
        await idle.close()
