"""Tokens, private traffic, internal paths, signed URLs, and exact error messages."""

import json

import pytest
from msgspec import structs

from paddock.cache.states import SandboxState
from paddock.gateway.limits import GatewayOptions
from paddock.resources.tokens import file_signature, hashed
from tests.gateway.rig import OK, SEED, get, read_request, recording, rig, route

TOKEN = SEED.access_token("abc")


def envd(path: str = "/files", **headers: str) -> bytes:
    return get(path, e2b_sandbox_port="49983", **headers)


async def test_envd_requires_the_sandboxes_token() -> None:
    async with rig() as paddock:
        await paddock.upstream(OK, port=49983)
        for token in (None, "wrong", SEED.access_token("other"), TOKEN + "x"):
            headers = {} if token is None else {"x_access_token": token}
            response = await paddock.request(envd("/process.Process/List", **headers))
            assert response.status == 401
            assert json.loads(response.body) == {
                "sandboxId": "abc",
                "message": "unauthorized: invalid or missing access token",
                "code": 401,
            }
        response = await paddock.request(envd("/process.Process/List", x_access_token=TOKEN))
        assert response.status == 200


async def test_upgrade_headers_are_not_forwarded_to_envd() -> None:
    seen = []
    offer = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2_settings": "AAMA"}
    async with rig() as paddock:
        await paddock.upstream(recording(seen), port=49983)
        wire = await paddock.connect()
        for _ in range(5):  # the later ones go the short way
            wire.send(envd(x_access_token=TOKEN, **offer))
            response = await wire.response()
            assert (response.status, response.headers.get("connection")) == (200, None)
        await wire.close()
    for _, headers, *_ in seen:
        assert not {"upgrade", "connection", "http2-settings"} & {*headers}


async def test_an_unsolicited_protocol_switch_of_envd_is_a_failure() -> None:
    async def serve(reader, writer) -> None:
        for number in range(3):
            await read_request(reader)
            if number < 2:
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            else:
                writer.write(
                    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n"
                    b"Connection: Upgrade\r\n\r\n"
                )

    async with rig() as paddock:
        await paddock.upstream(serve, port=49983)
        wire = await paddock.connect()
        for expected in (200, 200, 502):
            wire.send(envd(x_access_token=TOKEN, connection="Upgrade", upgrade="websocket"))
            assert (await wire.response()).status == expected
        await wire.close()


async def test_health_needs_no_token_and_envd_checks_file_signatures() -> None:
    async with rig() as paddock:
        await paddock.upstream(OK, port=49983)
        assert (await paddock.request(envd("/health"))).status == 200
        assert (await paddock.request(envd("/files?path=/x"))).status == 200
        assert (await paddock.request(envd("/files?path=/x", x_access_token="wrong"))).status == 401


@pytest.mark.parametrize(
    "path",
    ["/init", "/init?x=1", "//init", "/./init", "/x/../init", "/%69nit", "/%2569nit", "/INIT",
     "/init/", "/init;x", "/freeze", "/unfreeze", "/collapse", "/fsfreeze", "/fsthaw", "/upgrade",
     "\\init"],
)  # fmt: skip
async def test_envds_internal_paths_cannot_be_reached_however_they_are_written(path: str) -> None:
    seen = []
    async with rig() as paddock:
        await paddock.upstream(recording(seen), port=49983)
        response = await paddock.request(envd(path, x_access_token=TOKEN))
        assert response.status in (400, 404)
        assert seen == []


@pytest.mark.parametrize(
    "path",
    ["/_paddock/wake", "//_paddock/wake", "/%5fpaddock/activity", "/metrics", "/metrics/",
     "//METRICS?x=1", "/readyz"],
)  # fmt: skip
async def test_internal_paths_of_the_control_plane_are_not_reachable_from_outside(
    path: str,
) -> None:
    seen = []
    async with rig() as paddock:
        paddock.dialer.api_port = await paddock.listen(recording(seen))
        response = await paddock.request(f"POST {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        assert response.status == 404
        assert seen == []


async def test_ports_are_public_unless_traffic_is_private() -> None:
    token = SEED.traffic_token("abc")
    seen = []
    async with rig() as paddock:
        await paddock.upstream(recording(seen), traffic_token_hash=hashed(token))
        refused = await paddock.get()
        assert refused.status == 403
        assert json.loads(refused.body) == {
            "sandboxId": "abc",
            "message": "Sandbox is secured with traffic access token. "
            "Token header 'e2b-traffic-access-token' is missing",
            "code": 403,
        }
        assert (await paddock.get(e2b_traffic_access_token="wrong")).status == 403
        assert (await paddock.get(e2b_traffic_access_token=token)).status == 200
        assert "e2b-traffic-access-token" not in seen[0][1]


async def test_private_traffic_passes_through_another_clusters_gateway() -> None:
    token = SEED.traffic_token("abc")
    seen = []
    async with rig() as home, rig() as paddock:
        await home.upstream(recording(seen), traffic_token_hash=hashed(token))
        away = route(traffic_token_hash=hashed(token), remote=f"127.0.0.1:{home.port}")
        assert paddock.routes.put(away)
        assert (await paddock.get()).status == 403
        assert (await paddock.get("/?a=b", e2b_traffic_access_token=token)).status == 200
        assert seen[0][0] == "GET /?a=b HTTP/1.1"
        assert "e2b-traffic-access-token" not in seen[0][1]


async def test_unknown_and_killed_sandboxes_look_the_same_down_to_the_byte() -> None:
    async with rig() as paddock:
        await paddock.upstream(OK, "killed")
        await paddock.upstream(OK, "ended")
        known = paddock.routes.get("killed")
        assert known is not None
        paddock.routes.remove(known.key, known.version)
        paddock.change("ended", ends_at=paddock.clock.now())
        responses = [
            await paddock.get(e2b_sandbox_id=name) for name in ("unknown", "killed", "ended")
        ]
        bodies = {
            response.raw + response.body.replace(name, b"ID").replace(b'"ID"', b'"ID"')
            for response, name in zip(responses, (b"unknown", b"killed", b"ended"), strict=True)
        }
        texts = {body[body.index(b"{") :] for body in bodies}
        assert texts == {b'{"sandboxId":"ID","message":"The sandbox was not found","code":502}'}
        assert {response.status for response in responses} == {502}


async def test_a_closed_port_is_reported_in_the_form_that_clients_parse() -> None:
    async with rig() as paddock:
        paddock.routes.put(route())
        response = await paddock.get(e2b_sandbox_port="8080")
        assert response.status == 502
        assert json.loads(response.body) == {
            "sandboxId": "abc",
            "message": "The sandbox is running but port is not open",
            "port": 8080,
            "code": 502,
        }


async def test_browsers_get_an_error_page_with_escaped_content() -> None:
    async with rig() as paddock:
        response = await paddock.get(e2b_sandbox_id="unknown", accept="text/html,*/*")
        assert response.headers["content-type"].startswith("text/html")
        assert b"The sandbox was not found" in response.body
        assert b"<code>unknown</code>" in response.body


async def test_a_cors_preflight_needs_no_token_and_wakes_nothing() -> None:
    async with rig() as paddock:
        await paddock.upstream(OK, port=49983, state=SandboxState.PAUSED, wakes=True)
        response = await paddock.request(
            get(
                "/process.Process/Start",
                method="OPTIONS",
                e2b_sandbox_port="49983",
                origin="https://x",
                access_control_request_method="POST",
            )
        )
        assert response.status == 204
        assert response.headers["access-control-allow-origin"] == "*"
        assert "POST" in response.headers["access-control-allow-methods"]
        assert paddock.wakes == []


async def test_errors_can_be_read_by_browsers_of_other_origins() -> None:
    async with rig() as paddock:
        response = await paddock.get(e2b_sandbox_id="unknown")
        assert response.headers["access-control-allow-origin"] == "*"


async def test_the_host_is_masked_for_apps_and_not_for_envd() -> None:
    seen = []
    async with rig() as paddock:
        await paddock.upstream(recording(seen), mask_host="app.internal:${PORT}")
        await paddock.upstream(recording(seen), port=49983)
        await paddock.get()
        await paddock.request(envd("/health"))
        assert [headers["host"] for _, headers, _ in seen] == ["app.internal:8000", "localhost"]
        assert seen[0][1]["x-forwarded-host"] == "localhost"


def signed(path: str, sandbox_id: str, *, expiration: int | None = None) -> str:
    signature = file_signature(
        SEED.access_token(sandbox_id),
        path=path,
        operation="read",
        user="user",
        expiration=expiration,
    )
    url = f"/files?path={path}&username=user&signature={signature.replace('+', '%2B')}"
    return url if expiration is None else f"{url}&signature_expiration={expiration}"


async def test_a_signed_url_without_an_id_finds_its_sandbox() -> None:
    async with rig() as paddock:
        for number in range(300):
            paddock.routes.put(route(f"box{number}"))
        seen = []
        await paddock.upstream(recording(seen), "box299", port=49983)
        for _ in range(2):
            raw = f"GET {signed('/a', 'box299')} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()
            assert (await paddock.request(raw)).status == 200
        raw = raw.replace(b"path=/a", b"path=/b")
        assert (await paddock.request(raw)).status == 401
        assert len(seen) == 2


async def test_only_a_valid_signed_url_wakes() -> None:
    async with rig() as paddock:
        await paddock.upstream(OK, port=49983, state=SandboxState.PAUSED, wakes=True)
        paddock.elsewhere["abc"] = structs.replace(paddock.routes.get("abc"))
        for target in (
            "/files?path=/a&username=user&signature=v1_wrong",
            signed("/a", "abc", expiration=1),
            signed("/a", "other"),
            "/files?path=/a",
            "/health",
        ):
            assert (await paddock.request(envd(target))).status == 502
        assert paddock.wakes == []
        assert (await paddock.request(envd(signed("/a", "abc")))).status == 200
        assert paddock.wakes == ["abc"]


@pytest.mark.parametrize("port", ["49983", "8000"])
async def test_refused_requests_wake_nothing(port: str) -> None:
    private = hashed(SEED.traffic_token("abc"))
    async with rig() as paddock:
        await paddock.upstream(
            OK, port=int(port), state=SandboxState.PAUSED, wakes=True, traffic_token_hash=private
        )
        for headers in ({}, {"x_access_token": "wrong"}, {"e2b_traffic_access_token": "wrong"}):
            response = await paddock.get("/rpc", e2b_sandbox_port=port, **headers)
            assert response.status in (401, 403)
        assert paddock.wakes == []


async def test_forwarded_headers_are_trusted_only_if_enabled() -> None:
    for trusts, expected in ((True, "9.9.9.9, 127.0.0.1"), (False, "127.0.0.1")):
        seen = []
        async with rig(options=GatewayOptions(trusts_forwarded=trusts)) as paddock:
            await paddock.upstream(recording(seen))
            await paddock.get(x_forwarded_for="9.9.9.9", x_forwarded_proto="https")
            assert seen[0][1]["x-forwarded-for"] == expected
            assert seen[0][1]["x-forwarded-proto"] == ("https" if trusts else "http")


async def test_an_access_token_alone_addresses_its_sandbox() -> None:
    seen = []
    async with rig() as paddock:
        await paddock.upstream(recording(seen), port=49983)
        line = "POST /process.Process/List HTTP/1.1"
        ask = f"{line}\r\nHost: localhost\r\nX-Access-Token: {TOKEN}\r\n\r\n"
        assert (await paddock.request(ask.encode())).status == 200
        assert seen[0][0].startswith("POST /process.Process/List")
        stranger = ask.replace(TOKEN, SEED.access_token("other"))
        response = await paddock.request(stranger.encode())
        assert response.status == 502
        assert "was not found" in json.loads(response.body)["message"]
