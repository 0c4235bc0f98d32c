"""Web pages, and sandboxes that share the origin of the API in a browser."""

import asyncio

import pytest
from msgspec import structs

from paddock.gateway.http.response_heads import read_response
from paddock.gateway.http.response_scope import scoped
from paddock.resources.tokens import file_signature
from tests.gateway.rig import OK, SECRETS, SEED, get, read_request, recording, replying, rig

PREFIX = "/kruise/abc/8000"
KEY = "e2b_" + "0123456789" * 4
ORIGIN_WIDE = (
    b"Service-Worker-Allowed: /\r\n"
    b'Clear-Site-Data: "*"\r\n'
    b"Strict-Transport-Security: max-age=99\r\n"
    b'NEL: {"report_to":"x"}\r\n'
    b"Report-To: {}\r\n"
    b'Alt-Svc: h3=":1"\r\n'
    b"set-cookie: session=1; Domain=localhost; path=/; HttpOnly\r\n"
)


def by_path(path: str = f"{PREFIX}/", method: str = "GET", **headers: str) -> bytes:
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{lines}\r\n".encode()


def assert_scoped(raw: bytes) -> None:
    lowered = raw.lower()
    for name in (b"service-worker-allowed", b"clear-site", b"strict-tr", b"nel", b"report-to"):
        assert name + b":" not in lowered
    assert b"alt-svc" not in lowered
    assert b"domain=" not in lowered
    assert b"set-cookie: session=1; httponly; path=/kruise/abc/8000/\r\n" in lowered


@pytest.mark.parametrize(
    "status", [b"200 OK", b"302 Found", b"404 Not Found", b"204 No Content", b"500 Oops"]
)
async def test_headers_for_the_whole_origin_are_dropped_from_every_response(status) -> None:
    length = b"" if status.startswith(b"204") else b"Content-Length: 0\r\n"
    response = b"HTTP/1.1 %b\r\nX-Own: kept\r\n%b%b\r\n" % (status, length, ORIGIN_WIDE)
    async with rig() as paddock:
        await paddock.upstream(replying(response))
        by_path_raw = (await paddock.request(by_path())).raw
        assert_scoped(by_path_raw)
        assert b"X-Own: kept" in by_path_raw
        by_host = get(host="8000-abc.localhost").replace(b"e2b-sandbox", b"x-sandbox")
        assert ORIGIN_WIDE in (await paddock.request(by_host)).raw


async def test_headers_for_the_whole_origin_are_dropped_from_interim_and_streamed_responses() -> (
    None
):
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 103 Early Hints\r\n%b\r\n" % ORIGIN_WIDE)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n%b\r\n" % ORIGIN_WIDE)
        writer.write(b"2\r\nok\r\n0\r\n\r\n")

    async with rig() as paddock:
        await paddock.upstream(serve)
        wire = await paddock.connect()
        wire.send(by_path())
        status, _, raw = await wire.head()
        assert status == 103
        assert_scoped(raw)
        response = await wire.response()
        assert (response.status, response.body) == (200, b"ok")
        assert_scoped(response.raw)
        await wire.close()


async def test_headers_for_the_whole_origin_are_dropped_when_the_protocol_is_switched() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n")
        writer.write(b"Connection: Upgrade\r\n%b\r\nhello" % ORIGIN_WIDE)
        await reader.read()

    async with rig() as paddock:
        await paddock.upstream(serve)
        wire = await paddock.connect()
        wire.send(by_path(Connection="Upgrade", Upgrade="websocket"))
        status, headers, raw = await wire.head()
        assert (status, headers["upgrade"]) == (101, "websocket")
        assert_scoped(raw)
        assert await wire.reader.readexactly(5) == b"hello"
        await wire.close()


@pytest.mark.parametrize(
    ("cookie", "expected"),
    [
        (b"a=1", b"a=1; Path=/kruise/abc/8000/"),
        (b"a=1; Path=/", b"a=1; Path=/kruise/abc/8000/"),
        (b"a=1; path=/admin; Secure", b"a=1; Secure; Path=/kruise/abc/8000/admin"),
        (b"a=1; Path=/kruise/abc/8000/x", b"a=1; Path=/kruise/abc/8000/x"),
        (b"a=1; Path=/kruise/abc/80001", b"a=1; Path=/kruise/abc/8000/kruise/abc/80001"),
        (b"a=1; Path=/kruise/api", b"a=1; Path=/kruise/abc/8000/kruise/api"),
        (b"a=1;Path=/x;PATH=/y;DOMAIN=.e.com ; domain=f", b"a=1; Path=/kruise/abc/8000/y"),
        (b"a=1; Path=x", b"a=1; Path=/kruise/abc/8000/"),
        (b"a=1;\tPath\t=\t/", b"a=1; Path=/kruise/abc/8000/"),
        (b'a="x=y"; Max-Age=5', b'a="x=y"; Max-Age=5; Path=/kruise/abc/8000/'),
    ],
)
def test_cookies_are_limited_to_the_prefix_of_their_sandbox(cookie: bytes, expected: bytes) -> None:
    head = read_response(
        b"HTTP/1.1 200 OK\r\nSet-Cookie: " + cookie + b"\r\nContent-Length: 0\r\n", method="GET"
    )
    assert scoped(head, PREFIX).lines[0] == b"Set-Cookie: " + expected + b"\r\n"
    assert not any(b"a=" in line for line in scoped(head, "").lines)


def test_a_response_without_such_headers_is_not_copied() -> None:
    head = read_response(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n", method="GET")
    assert scoped(head, PREFIX) is head


async def test_a_page_cannot_reach_the_whole_origin_through_other_addresses() -> None:
    response = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Type: text/html\r\n%b\r\nok"
    signature = file_signature(
        SEED.access_token("abc"), path="/a.html", operation="read", user="", expiration=None
    )
    signed = f"/files?path=/a.html&signature={signature.replace('+', '%2B')}"
    async with rig() as paddock:
        await paddock.upstream(replying(response % ORIGIN_WIDE))
        await paddock.upstream(replying(response % ORIGIN_WIDE), port=49983)
        for _ in range(3):  # The second one would be cached.
            shown = await paddock.get(sec_fetch_site="same-origin")
            assert "set-cookie" not in shown.headers
            assert "clear-site-data" not in shown.headers
        file = await paddock.request(by_path(signed))
        assert file.status == 200
        assert "clear-site-data" not in file.headers
        assert file.headers["content-security-policy"] == "sandbox"
        worker = await paddock.request(by_path(signed, Service_Worker="script"))
        assert worker.status == 403
        # Programs that address the sandbox by headers get everything.
        assert ORIGIN_WIDE in (await paddock.get()).raw


@pytest.mark.parametrize(
    ("path", "status"),
    [
        (f"{PREFIX}/sw.js", 200),
        (PREFIX, 403),
        (f"{PREFIX}?sw.js", 403),
        ("/openapi.json", 403),
        ("/kruise/api/health", 403),
    ],
)
async def test_a_service_worker_controls_its_own_sandbox_at_most(path: str, status: int) -> None:
    async with rig() as paddock:
        await paddock.upstream(OK)
        paddock.dialer.api_port = await paddock.listen(OK)
        found = await paddock.request(by_path(path, Service_Worker="script"))
        assert found.status == status


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Sec_Fetch_Site": "none", "Sec_Fetch_Mode": "navigate"}, 200),
        ({"Sec_Fetch_Site": "same-origin"}, 403),
        ({"Sec_Fetch_Site": "same-origin", "Referer": "http://localhost/console"}, 403),
        ({"Sec_Fetch_Site": "same-site"}, 403),
        ({"Sec_Fetch_Site": "cross-site"}, 403),
        ({"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate"}, 403),
        ({"sec_fetch_site": "CROSS-SITE"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec_Fetch_Site": "same-origin", "X_API_Key": KEY}, 200),
        ({"Sec_Fetch_Site": "cross-site", "Authorization": "Bearer x"}, 200),
    ],
)
async def test_pages_call_the_api_only_with_credentials_of_their_own(headers, status) -> None:
    async with rig() as paddock:
        paddock.dialer.api_port = await paddock.listen(OK)
        assert (await paddock.request(by_path("/sandboxes", **headers))).status == status


@pytest.mark.parametrize(
    ("method", "headers", "status"),
    [
        ("GET", {}, 200),
        ("GET", {"Sec_Fetch_Site": "same-origin"}, 200),
        ("POST", {"Sec_Fetch_Site": "same-origin"}, 200),
        ("GET", {"Sec_Fetch_Site": "none"}, 200),
        ("GET", {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate"}, 200),
        ("GET", {"Sec_Fetch_Site": "same-site", "Sec_Fetch_Mode": "navigate"}, 200),
        ("POST", {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate"}, 403),
        ("GET", {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "no-cors"}, 403),
        ("GET", {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "cors"}, 403),
        ("GET", {"Sec_Fetch_Site": "same-site", "Sec_Fetch_Mode": "cors"}, 403),
        ("GET", {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "websocket"}, 403),
        ("OPTIONS", {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "cors"}, 200),
        ("GET", {"Sec_Fetch_Site": "cross-site", "E2b_Traffic_Access_Token": "x"}, 200),
    ],
)
async def test_other_sites_open_a_sandbox_addressed_by_path_but_do_not_read_it(
    method: str, headers: dict[str, str], status: int
) -> None:
    async with rig() as paddock:
        await paddock.upstream(OK)
        assert (await paddock.request(by_path(method=method, **headers))).status == status
        by_host = get(method=method, host="8000-abc.localhost", **headers)
        by_host = by_host.replace(b"e2b-sandbox", b"x-sandbox")
        assert (await paddock.request(by_host)).status == 200


@pytest.mark.parametrize("address", ["path", "headers", "host"])
@pytest.mark.parametrize(
    ("name", "value", "is_passed"),
    [
        ("X_API_Key", KEY, False),
        ("X_API_Key", SECRETS[1], False),
        ("Authorization", f"Bearer {KEY}", False),
        ("Authorization", f"bearer  {SECRETS[0]}", False),
        ("X_API_Key", "key-of-an-app", True),
        ("Authorization", "Bearer token-of-an-app", True),
        ("Authorization", "Basic dXNlcjo=", True),
        ("X_Access_Token", SEED.access_token("abc"), True),
    ],
)
async def test_sandboxes_do_not_receive_credentials_of_the_api(
    address: str, name: str, value: str, is_passed: bool
) -> None:
    seen: list[tuple[str, dict[str, str], bytes]] = []
    request = {
        "path": by_path(**{name: value}),
        "headers": get(**{name: value}),
        "host": by_path("/", **{name: value}).replace(b"localhost", b"8000-abc.localhost"),
    }[address]
    async with rig() as paddock:
        await paddock.upstream(recording(seen))
        for _ in range(3):  # The later ones are cached.
            assert (await paddock.request(request)).status == 200
    for _, headers, _ in seen:
        assert (headers.get(name.replace("_", "-").lower()) == value) is is_passed
        assert "paddock-gateway" not in headers


async def test_the_api_receives_credentials_and_the_address_of_the_client() -> None:
    seen: list[tuple[str, dict[str, str], bytes]] = []
    async with rig() as paddock:
        paddock.dialer.api_port = await paddock.listen(recording(seen))
        request = by_path(
            "/sandboxes", X_API_Key=KEY, Authorization=f"Bearer {SECRETS[0]}", X_Real_Ip="1.2.3.4"
        )
        assert (await paddock.request(request, "127.0.0.9")).status == 200
    ((_, headers, _),) = seen
    assert headers["x-api-key"] == KEY
    assert headers["authorization"] == f"Bearer {SECRETS[0]}"
    assert headers["x-real-ip"] == "127.0.0.9"


async def test_a_gateway_of_another_cluster_does_not_change_the_response_again() -> None:
    response = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n%b\r\nok" % ORIGIN_WIDE
    async with rig() as home, rig() as away:
        await home.upstream(replying(response))
        known = home.routes.get("abc")
        assert known is not None
        assert away.routes.put(structs.replace(known, remote=f"127.0.0.1:{home.port}"))
        by_host = by_path("/", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="cors").replace(
            b"localhost", b"8000-abc.localhost"
        )
        assert ORIGIN_WIDE in (await away.request(by_host)).raw
        assert_scoped((await away.request(by_path())).raw)
        forged = by_path(Paddock_Gateway="0" * 64, Sec_Fetch_Site="cross-site")
        assert (await home.request(forged)).status == 403
