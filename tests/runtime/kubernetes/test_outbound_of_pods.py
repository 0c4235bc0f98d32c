"""Proxies, CA certificates and mirrors of the installation are sent to the envds of pods."""

from typing import Any

from aiohttp import web

from paddock.runtime.kubernetes.envd_client import PodEnvdClient
from paddock.runtime.port import AgentConfig, OutboundConfig
from tests.ports import free_ports


async def test_envd_gets_the_settings_of_installation_template_and_claim():
    sent: list[Any] = []

    async def init(request: web.Request) -> web.Response:
        sent.append(await request.json())
        return web.Response(status=204)

    app = web.Application()
    app.add_routes([web.post("/init", init)])
    runner = web.AppRunner(app)
    await runner.setup()
    [port] = free_ports(1)
    await web.TCPSite(runner, "127.0.0.1", port).start()
    client = PodEnvdClient(
        lambda uid: ("token",),
        control_port=port,
        installation=OutboundConfig(http_proxy="http://proxy:1", pip_index="https://a/simple"),
    )
    agent = AgentConfig(
        env={"HTTPS_PROXY": "http://own:1"},
        outbound=OutboundConfig(pip_index="https://b/simple", ca_certificates="PEM"),
    )
    try:
        await client.configure("u1", "127.0.0.1", agent)
    finally:
        await client.close()
        await runner.cleanup()

    [body] = sent
    env = body["envVars"]
    assert (env["HTTP_PROXY"], env["HTTPS_PROXY"]) == ("http://proxy:1", "http://own:1")
    assert env["PIP_INDEX_URL"] == "https://b/simple"
    assert body["outbound"]["caCertificates"] == "PEM\n"
