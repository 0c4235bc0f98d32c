"""Framing, keep-alive, pipelining and upgrades: messages pass unchanged."""

import asyncio
import hashlib
import random

import pytest

from tests.gateway.rig import OK, get, read_request, recording, replying, rig
from tests.runtime.local.nodes import eventually


async def test_a_request_reaches_its_sandbox_and_the_answer_comes_back() -> None:
    seen = []
    async with rig() as paddock:
        await paddock.upstream(recording(seen, b"hello"))
        response = await paddock.get("/a/b?c=d", x_custom="Ü")
        assert (response.status, response.body) == (200, b"hello")
        line, headers, _ = seen[0]
        assert line == "GET /a/b?c=d HTTP/1.1"
        assert headers["x-custom"] == "Ü"
        assert headers["host"] == "localhost"
        assert headers["x-forwarded-for"] == "127.0.0.1"
        assert headers["x-forwarded-proto"] == "http"
        assert "e2b-sandbox-id" not in headers


@pytest.mark.parametrize(
    ("response", "body"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", b"hello"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n",
         b"hello"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;x=y\r\nhello\r\n0\r\n\r\n",
         b"hello"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n", b""),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b""),
        (b"HTTP/1.1 404 \r\nContent-Length: 1\r\n\r\nx", b"x"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\nhello", b"hello"),
    ],
)  # fmt: skip
async def test_every_response_framing_keeps_both_connections(response: bytes, body: bytes) -> None:
    async with rig() as paddock:
        await paddock.upstream(replying(response))
        wire = await paddock.connect()
        for _ in range(3):
            wire.send(get())
            assert (await wire.response()).body == body
        await wire.close()
        assert paddock.dialer.dials == 1


@pytest.mark.parametrize(
    ("framing", "body"),
    [
        (b"content-length: 5\r\n", b"hello"),
        (b"transfer-encoding: chunked\r\n", b"2\r\nhe\r\n3;ext\r\nllo\r\n0\r\n\r\n"),
        (b"transfer-encoding: Chunked\r\n", b"5\r\nhello\r\n0\r\n\r\n"),
    ],
)
@pytest.mark.parametrize("is_trickled", [False, True])
async def test_every_request_framing_is_forwarded(
    framing: bytes, body: bytes, is_trickled: bool
) -> None:
    seen = []
    request = get(method="POST")[:-2] + framing + b"\r\n" + body
    async with rig() as paddock:
        await paddock.upstream(recording(seen))
        wire = await paddock.connect()
        for _ in range(2):
            if is_trickled:
                for byte in request:
                    wire.send(bytes([byte]))
                    await asyncio.sleep(0)
            else:
                wire.send(request)
            assert (await wire.response()).status == 200
        await wire.close()
        assert [item[2] for item in seen] == [b"hello", b"hello"]


async def test_trailers_pass_in_both_directions_except_framing_and_tokens() -> None:
    seen = []

    async def serve(reader, writer) -> None:
        seen.append(await read_request(reader))
        writer.write(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n"
            b"X-Sum: 1\r\nContent-Length: 9\r\n\r\n"
        )
        await writer.drain()

    async with rig() as paddock:
        await paddock.upstream(serve)
        response = await paddock.request(
            get(method="POST", transfer_encoding="chunked")
            + b"1\r\nx\r\n0\r\nX-Mine: 2\r\nX-Access-Token: no\r\n\r\n"
        )
        assert (response.body, response.headers["x-sum"]) == (b"ok", "1")
        assert "content-length" not in response.headers
        assert seen[0][1]["trailer-x-mine"] == "2"
        assert "trailer-x-access-token" not in seen[0][1]


async def test_head_responses_have_a_length_and_no_body() -> None:
    async with rig() as paddock:
        await paddock.upstream(replying(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"))
        wire = await paddock.connect()
        for _ in range(2):
            wire.send(get(method="HEAD"))
            response = await wire.response(head_only=True)
            assert response.headers["content-length"] == "1000"
        await wire.close()
        assert paddock.dialer.dials == 1


async def test_pipelined_requests_are_answered_in_order() -> None:
    seen = []
    async with rig() as paddock:
        await paddock.upstream(recording(seen))
        wire = await paddock.connect()
        wire.send(b"".join(get(f"/{number}") for number in range(50)))
        for _ in range(50):
            assert (await wire.response()).body == b"ok"
        await wire.close()
        assert [line.split()[1] for line, _, _ in seen] == [f"/{n}" for n in range(50)]


async def test_pipelined_requests_with_bodies_and_to_different_sandboxes_do_not_mix() -> None:
    first, second = [], []
    async with rig() as paddock:
        await paddock.upstream(recording(first, b"one"), "abc")
        await paddock.upstream(recording(second, b"two"), "xyz")
        wire = await paddock.connect()
        for number in range(20):
            body = f"body {number}".encode()
            to = "abc" if number % 2 else "xyz"
            wire.send(get(method="POST", e2b_sandbox_id=to, content_length=str(len(body))) + body)
        for number in range(20):
            assert (await wire.response()).body == (b"one" if number % 2 else b"two")
        await wire.close()
        assert [body for _, _, body in first] == [b"body %d" % n for n in range(1, 20, 2)]
        assert [body for _, _, body in second] == [b"body %d" % n for n in range(0, 20, 2)]


async def test_pipelining_is_limited_by_backpressure_and_nothing_is_lost() -> None:
    seen = []
    async with rig() as paddock:
        await paddock.upstream(recording(seen))
        wire = await paddock.connect()
        count = 3000
        wire.send(b"".join(get(f"/{number}") for number in range(count)))
        for _ in range(count):
            assert (await wire.response()).status == 200
        await wire.close()
        assert len(seen) == count


async def test_a_body_that_lasts_until_the_sandbox_closes_is_complete() -> None:
    async def serve(reader, writer) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nuntil ")
        await writer.drain()
        writer.write(b"the end")
        await writer.drain()

    async with rig() as paddock:
        await paddock.upstream(serve)
        wire = await paddock.connect()
        for _ in range(2):
            wire.send(get())
            response = await wire.response()
            assert response.body == b"until the end"
            assert response.headers["transfer-encoding"] == "chunked"
        await wire.close()


async def test_http_1_0_clients_get_http_1_0_framing() -> None:
    old = b"GET / HTTP/1.0\r\nE2b-Sandbox-Id: abc\r\nE2b-Sandbox-Port: 8000\r\n"
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n"
    async with rig() as paddock:
        await paddock.upstream(replying(chunked))
        wire = await paddock.connect()
        wire.send(old + b"\r\n")
        raw = await wire.rest()
        assert raw.endswith(b"\r\n\r\nok")
        assert b"chunked" not in raw.lower()
        await wire.close()
        # Kept alive only on request, and if the end of the response is known.
        await paddock.upstream(OK, port=8001)
        wire = await paddock.connect()
        for _ in range(2):
            wire.send(old.replace(b"8000", b"8001") + b"Connection: keep-alive\r\n\r\n")
            response = await wire.response()
            assert (response.body, response.headers["connection"]) == (b"ok", "keep-alive")
        await wire.close()


async def test_a_connection_to_an_http_1_0_sandbox_is_not_reused() -> None:
    async with rig() as paddock:
        await paddock.upstream(replying(b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok"))
        wire = await paddock.connect()
        for _ in range(2):
            wire.send(get())
            assert (await wire.response()).body == b"ok"
        await wire.close()
        assert paddock.dialer.dials == 2


async def test_100_continue_comes_from_the_sandbox() -> None:
    async def serve(reader, writer) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"100-continue" in head
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await reader.readexactly(4)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n" + body)
        await writer.drain()

    async with rig() as paddock:
        await paddock.upstream(serve)
        wire = await paddock.connect()
        wire.send(get(method="POST", content_length="4", expect="100-continue"))
        status, _, _ = await wire.head()
        assert status == 100
        wire.send(b"body")
        response = await wire.response()
        assert (response.status, response.body) == (200, b"body")
        await wire.close()


async def test_an_early_error_response_reaches_a_client_that_still_sends() -> None:
    async def serve(reader, writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig")
        await writer.drain()
        while await reader.read(100_000):
            pass

    async with rig() as paddock:
        await paddock.upstream(serve)
        wire = await paddock.connect()
        wire.send(get(method="POST", content_length="100000000") + b"x" * 500_000)
        response = await wire.response()
        assert (response.status, response.body) == (413, b"big")
        assert response.headers.get("connection") != "keep-alive"
        await wire.close()


async def test_a_websocket_passes_bytes_sent_early_on_both_sides_and_half_closes() -> None:
    async def serve(reader, writer) -> None:
        _, headers, _ = await read_request(reader)
        assert headers["upgrade"] == "websocket"
        assert headers["connection"].lower() == "upgrade"
        assert headers["sec-websocket-key"] == "k"
        writer.write(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Accept: a\r\n\r\nfirst from the sandbox;"
        )
        while data := await reader.read(1000):
            writer.write(data.upper())
            await writer.drain()
        writer.write(b"after your end")
        await writer.drain()

    async with rig() as paddock:
        await paddock.upstream(serve)
        wire = await paddock.connect()
        wire.send(get(connection="Upgrade", upgrade="websocket", sec_websocket_key="k") + b"early;")
        status, headers, _ = await wire.head()
        assert status == 101
        assert headers["sec-websocket-accept"] == "a"
        assert headers["upgrade"] == "websocket"
        wire.send(b"late;")
        wire.writer.write_eof()
        assert await wire.rest() == b"first from the sandbox;EARLY;LATE;after your end"
        await wire.close()
        await eventually(lambda: paddock.activity.connections == 0)
        traffic = paddock.activity.get("uid-abc")
        assert traffic is not None
        assert (traffic.in_flight, traffic.request_bytes) == (0, 11)


async def test_any_upgrade_works_and_a_refused_upgrade_is_a_normal_response() -> None:
    async def serve(reader, writer) -> None:
        _, headers, _ = await read_request(reader)
        if headers.get("upgrade") == "my-protocol/7":
            writer.write(
                b"HTTP/1.1 101 Yes\r\nUpgrade: my-protocol/7\r\nConnection: upgrade\r\n\r\n"
            )
            writer.write(await reader.readexactly(3))
        else:
            writer.write(b"HTTP/1.1 426 No\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()

    async with rig() as paddock:
        await paddock.upstream(serve)
        wire = await paddock.connect()
        wire.send(get(connection="keep-alive, Upgrade", upgrade="my-protocol/7"))
        assert (await wire.head())[0] == 101
        wire.send(b"\x00\xff\n")
        assert await wire.rest() == b"\x00\xff\n"
        await wire.close()
        response = await paddock.get(connection="Upgrade", upgrade="other")
        assert response.status == 426


async def test_an_upgrade_header_without_connection_is_not_forwarded() -> None:
    seen = []
    async with rig() as paddock:
        await paddock.upstream(recording(seen))
        assert (await paddock.get(upgrade="h2c")).status == 200
        assert "upgrade" not in seen[0][1]


async def test_an_unsolicited_protocol_switch_is_refused() -> None:
    async with rig() as paddock:
        await paddock.upstream(replying(b"HTTP/1.1 101 X\r\nUpgrade: evil\r\n\r\n"))
        assert (await paddock.get()).status == 502


async def test_large_bodies_arrive_unchanged_in_both_directions() -> None:
    size = 8_000_000
    data = random.Random(1).randbytes(size)

    async def serve(reader, writer) -> None:
        _, _, body = await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for at in range(0, size, 100_001):
            piece = body[at : at + 100_001]
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    async with rig() as paddock:
        await paddock.upstream(serve)
        wire = await paddock.connect()
        wire.send(get(method="PUT", content_length=str(size)) + data)
        response = await wire.response()
        assert hashlib.sha256(response.body).digest() == hashlib.sha256(data).digest()
        await wire.close()


async def test_hop_by_hop_headers_are_not_forwarded() -> None:
    seen = []
    async with rig() as paddock:
        await paddock.upstream(recording(seen))
        await paddock.request(
            get(
                connection="x-secret, keep-alive",
                x_secret="1",
                te="trailers",
                proxy_authorization="Basic x",
                keep_alive="timeout=5",
                x_forwarded_for="6.6.6.6",
                x_real_ip="6.6.6.6",
                forwarded="for=6.6.6.6",
                x_kept="1",
            )[:-2]
            + b"X_Forwarded_For: 6.6.6.6\r\n\r\n"
        )
        headers = seen[0][1]
        assert headers["x-kept"] == "1"
        assert headers["x-forwarded-for"] == "127.0.0.1"
        assert not headers.keys() & {
            "x-secret", "te", "proxy-authorization", "keep-alive", "x-real-ip", "forwarded",
            "x_forwarded_for",
        }  # fmt: skip
