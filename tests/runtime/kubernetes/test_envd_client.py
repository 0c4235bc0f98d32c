"""Responses of pods, which may send anything, become errors of one sandbox."""

import pytest
from aiohttp import web

from paddock.kit.errors import InvalidError
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
    client = PodEnvdClient(lambda _: "token", control_port=port)
    try:
        with pytest.raises(InvalidError) as failed:
            await client.wait_ready("u1", "127.0.0.1", seconds=10)
    finally:
        await client.close()
        await runner.cleanup()
    assert failed.value.message == reason
