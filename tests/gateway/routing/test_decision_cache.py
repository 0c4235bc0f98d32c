"""Cached heads and decisions never change the result of a request."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from paddock.cache.states import SandboxState
from paddock.gateway.http.client import ClientConnection
from paddock.gateway.http.request_heads import BadHead, RequestHead, RequestReader
from paddock.gateway.http.request_heads import read_request as read_afresh
from paddock.gateway.limits import GatewayLimits
from paddock.resources.tokens import hashed
from tests.gateway.rig import OK, SEED, Rig, get, read_request, recording, rig, route
from tests.runtime.local.nodes import eventually

ENVD = {"e2b_sandbox_port": "49983", "x_access_token": SEED.access_token("abc")}


async def warm(paddock: Rig, **headers: str) -> None:
    """Create an idle upstream connection and a cached decision for these header lines."""
    for path in ("/a", "/b", "/c"):
        assert (await paddock.get(path, **headers)).status == 200


# ---- parsing -------------------------------------------------------------------------------

LINES = st.sampled_from(
    [
        b"GET / HTTP/1.1\r\n",
        b"GET /x?y HTTP/1.1\r\n",
        b"GET / HTTP/1.0\r\n",
        b"GET / HTTP/1.2\r\n",
        b"GET  / HTTP/1.1\r\n",
        b"get / HTTP/1.1\r\n",
        b"GET /\tx HTTP/1.1\r\n",
        b"POST / HTTP/1.1\r\n",
        b"OPTIONS * HTTP/1.1\r\n",
        b"CONNECT a:1 HTTP/1.1\r\n",
        b"GET http://other/x HTTP/1.1\r\n",
        b"GET http://o ther/x HTTP/1.1\r\n",
        b"GET http://oth_er%/x HTTP/1.1\r\n",
        b"GET / HTTP/1.1\n",
        b"GET / HTTP/1.1\rX: 1\r\n",
        b"1\r\n",
        b"\r\n",
        b"",
    ]
)
BLOCKS = st.lists(
    st.sampled_from(
        [
            b"Host: a\r\n",
            b"Host: b c\r\n",
            b"Connection: close\r\n",
            b"Connection: upgrade, x\r\n",
            b"Upgrade: x\r\n",
            b"X: 1\r\n",
            b"Content-Length: 5\r\n",
            b"Transfer-Encoding: chunked\r\n",
            b"X-Access-Token: t\r\n",
            b"broken\r\n",
            b"\r\n",
        ]
    ),
    max_size=4,
).map(b"".join)


def outcome(read: Any, block: bytes) -> Any:
    try:
        head: RequestHead = read(block)
    except BadHead as bad:
        return bad.status, bad.message
    return structs.astuple(head)


@given(st.lists(st.tuples(LINES, BLOCKS), min_size=2, max_size=12))
def test_a_head_is_parsed_the_same_with_and_without_the_cache(requests) -> None:
    reader = RequestReader()
    for line, lines in requests * 2:
        assert outcome(reader.read, line + lines) == outcome(read_afresh, line + lines)


def test_the_cache_of_heads_is_bounded_and_skips_long_ones() -> None:
    reader = RequestReader()
    for number in range(5_000):
        reader.read(b"GET / HTTP/1.1\r\nHost: a\r\nX: %d\r\n" % number)
    assert len(reader._young) + len(reader._old) <= 2048
    known = reader._young[b"1\r\nHost: a\r\nX: 4999\r\n"]
    reader.read(b"GET /%b HTTP/1.1\r\nHost: a\r\nX: 4999\r\n" % (b"x" * 5_000))
    reader.read(b"GET / HTTP/1.1\r\nHost: a\r\nX: %b\r\n" % (b"x" * 5_000))
    assert len(known.line) < 100
    assert not any(len(lines) > 2048 for lines in reader._young)


# ---- deciding ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/init", 404),
        ("POST", "/x/../init", 404),
        ("POST", "//INIT?x", 404),
        ("GET", "/%69nit", 404),
        ("GET", "/files/init", 200),
        ("OPTIONS", "/a", 204),
        ("GET", "/kruise/abc/49983/init", 404),
        ("GET", "/kruise/abc/49983/a", 200),
        ("GET", "/kruise/nobody/49983/a", 502),
        ("GET", "/kruise/other/49983/a", 401),
        ("GET", "http://localhost/init", 404),
    ],
)
async def test_the_request_line_is_checked_each_time(method: str, path: str, status: int) -> None:
    async with rig() as paddock:
        await paddock.upstream(OK, port=49983)
        await paddock.upstream(OK, "other", port=49983)
        headers = dict(ENVD)
        if method == "OPTIONS":
            headers["access_control_request_method"] = "GET"
        await warm(paddock, **headers)
        response = await paddock.request(get(path, method=method, **headers))
        assert response.status == status
        assert (await paddock.get("/a", **headers)).status == 200


async def test_the_connect_call_still_goes_to_the_api() -> None:
    async with rig() as paddock:
        calls: list[Any] = []
        await paddock.upstream(OK, port=49983, access_token_hash="")
        paddock.dialer.api_port = await paddock.listen(recording(calls, b"api"))
        await warm(paddock, e2b_sandbox_port="49983")
        connect = get("/sandboxes/abc/connect", method="POST", e2b_sandbox_port="49983")
        response = await paddock.request(connect)
        assert response.body == b"api"
        assert len(calls) == 1


async def test_an_old_token_is_refused_after_a_change() -> None:
    async with rig() as paddock:
        await paddock.upstream(OK, port=49983)
        await warm(paddock, **ENVD)
        paddock.change(access_token_hash=hashed("another"))
        assert (await paddock.get("/a", **ENVD)).status == 401
        paddock.change(access_token_hash=hashed(ENVD["x_access_token"]))
        assert (await paddock.get("/a", **ENVD)).status == 200


async def test_a_sandbox_made_private_or_ended_takes_effect_at_once() -> None:
    async with rig() as paddock:
        await paddock.upstream(OK)
        await warm(paddock)
        paddock.change(traffic_token_hash=hashed("secret"))
        assert (await paddock.get("/a")).status == 403
        await warm(paddock, e2b_traffic_access_token="secret")
        paddock.change(state=SandboxState.DEAD)
        assert (await paddock.get("/a", e2b_traffic_access_token="secret")).status == 502


async def test_a_paused_sandbox_is_woken_and_a_new_incarnation_gets_new_connections() -> None:
    async with rig() as paddock:
        await paddock.upstream(OK, wakes=True)
        await warm(paddock)
        dials = paddock.dialer.dials
        paddock.change(state=SandboxState.PAUSED)
        assert (await paddock.get("/a")).status == 200
        assert paddock.wakes == ["abc"]
        paddock.change(incarnation=7)
        assert (await paddock.get("/a")).status == 200
        assert paddock.dialer.dials == dials + 2


async def test_a_new_sandbox_with_the_same_id_gets_no_requests_of_the_old_one() -> None:
    async with rig() as paddock:
        old: list[Any] = []
        new: list[Any] = []
        await paddock.upstream(recording(old, b"old"))
        await warm(paddock)
        seen = len(old)
        await paddock.upstream(recording(new, b"new"), port=8000)
        paddock.routes.put(route(version=9, uid="uid-new"))
        assert (await paddock.get("/a")).body == b"new"
        assert len(old) == seen


async def test_clients_of_different_listeners_do_not_share_decisions() -> None:
    async with rig() as paddock:
        seen: list[Any] = []
        await paddock.upstream(recording(seen))
        await warm(paddock, x_forwarded_for="9.9.9.9")
        assert seen[-1][1]["x-forwarded-for"] == "127.0.0.1"
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: ClientConnection(paddock.gateway, trusts_forwarded=True), "127.0.0.1", 0
        )
        own, paddock.port = paddock.port, server.sockets[0].getsockname()[1]
        await warm(paddock, x_forwarded_for="9.9.9.9")
        assert seen[-1][1]["x-forwarded-for"] == "9.9.9.9, 127.0.0.1"
        paddock.port = own
        await warm(paddock, x_forwarded_for="9.9.9.9")
        assert seen[-1][1]["x-forwarded-for"] == "127.0.0.1"
        server.close()


async def test_the_request_limit_holds_for_cached_decisions() -> None:
    release = asyncio.Event()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            first, _, _ = await read_request(reader)
            if "/slow" in first:
                await release.wait()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    async with rig(GatewayLimits(requests_per_sandbox=2)) as paddock:
        await paddock.upstream(slow)
        await warm(paddock)
        waiting = [asyncio.create_task(paddock.get("/slow")) for _ in range(2)]
        in_flight = paddock.gateway._inflight.in_flight["uid-abc"]
        await eventually(lambda: len(in_flight) == 2)
        assert (await paddock.get("/a")).status == 429
        release.set()
        assert [response.status for response in await asyncio.gather(*waiting)] == [200, 200]
        assert (await paddock.get("/a")).status == 200
        assert not in_flight


async def test_requests_by_cached_decisions_are_counted() -> None:
    async with rig() as paddock:
        await paddock.upstream(OK)
        for _ in range(5):
            await warm(paddock)
        traffic = paddock.activity.get("uid-abc")
        assert traffic is not None
        assert (traffic.requests, traffic.in_flight, traffic.response_bytes) == (15, 0, 30)
        assert paddock.activity.statuses == {200: 15}
