"""Connections to pods by IPv4 and IPv6 address."""

import asyncio
from pathlib import Path

import pytest
from msgspec import structs

from paddock.adapters.dialer import LocalDialer
from paddock.gateway.http.upstream import IdleConnections, UpstreamConnection
from paddock.gateway.routing.addressing import TASKS_PORT
from paddock.settings import Settings
from tests.gateway.rig import route


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
async def test_a_pod_is_reached_by_its_address(address: str) -> None:
    if ":" in address and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this kernel has no IPv6")
    server = await asyncio.start_server(lambda _, writer: writer.close(), address, 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        pod = structs.replace(route(), ip=address)
        reached = await LocalDialer(Settings()).dial(
            pod, port, UpstreamConnection(IdleConnections())
        )
        reached.close()
        await asyncio.sleep(0)


@pytest.mark.parametrize("address", ["127.0.0.1", "[::1]"])
async def test_the_task_api_of_a_pod_is_reached_at_its_envd(address: str) -> None:
    if ":" in address and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this kernel has no IPv6")
    host = address.strip("[]")
    server = await asyncio.start_server(lambda _, writer: writer.close(), host, 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        pod = structs.replace(route(), ip=host, envd=f"http://{address}:{port}")
        reached = await LocalDialer(Settings()).dial(
            pod, TASKS_PORT, UpstreamConnection(IdleConnections())
        )
        reached.close()
        await asyncio.sleep(0)
