"""Responses of pods, which may send anything, become errors of one sandbox."""

import pytest
from aiohttp import web

from paddock.kit.errors import InvalidError, PaddockError
from paddock.resources.tokens import TokenSeed, control_tokens
from paddock.runtime.kubernetes import names
from paddock.runtime.kubernetes.envd_client import PodEnvdClient
from tests.ports import free_ports


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"message": "no shell"}', "no shell"),
        (b'{"message": "' + b"x" * 100_000 + b'"}', "x" * 500),
        (b"<html>", "<html>"),
        (b'{"message": 1}', '{"message": 1}'),
        (b'{"message": "\xff"}', '{"message": "\ufffd"}'),
        (b"", "it can never become ready"),
    ],
)
async def test_a_pod_that_can_never_become_ready_fails_with_a_short_reason(
    body: bytes, reason: str
):
    async def ready(_: web.Request) -> web.Response:
        return web.Response(status=names.STATUS_NEVER_READY, body=body)

    app = web.Application()
    app.add_routes([web.get("/ready", ready)])
    runner = web.AppRunner(app)
    await runner.setup()
    [port] = free_ports(1)
    await web.TCPSite(runner, "127.0.0.1", port).start()
    client = PodEnvdClient(lambda _: ("token",), control_port=port)
    try:
        with pytest.raises(InvalidError) as failed:
            await client.wait_ready("u1", "127.0.0.1", seconds=10)
    finally:
        await client.close()
        await runner.cleanup()
    assert failed.value.message == reason


async def test_a_sidecar_from_before_a_rotation_is_called_with_the_token_of_its_seed() -> None:
    earlier, uid = TokenSeed(b"earlier"), "u1"
    [accepted] = control_tokens(earlier, uid)
    given: list[str] = []

    async def metrics(request: web.Request) -> web.Response:
        given.append(request.headers["Authorization"].removeprefix("Bearer "))
        return web.json_response({"cpu": 1}, status=200 if given[-1] == accepted else 401)

    app = web.Application()
    app.add_routes([web.get("/metrics", metrics)])
    runner = web.AppRunner(app)
    await runner.setup()
    [port] = free_ports(1)
    await web.TCPSite(runner, "127.0.0.1", port).start()
    seed = TokenSeed(b"newest", b"earlier", b"first")
    client = PodEnvdClient(lambda each: control_tokens(seed, each), control_port=port)
    stranger = PodEnvdClient(lambda each: control_tokens(TokenSeed(b"x"), each), control_port=port)
    try:
        assert await client.metrics(uid, "127.0.0.1") == {"cpu": 1}
        with pytest.raises(PaddockError):
            await stranger.metrics(uid, "127.0.0.1")
    finally:
        await client.close()
        await stranger.close()
        await runner.cleanup()
    assert given[:-1] == list(control_tokens(seed, uid)[:2]), "the newest first"
