"""Ports of a sandbox are reachable on every address its servers listen on."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from paddock.adapters.dialer import LocalDialer
from paddock.cache.states import SandboxState
from paddock.gateway.routing.routes import Route
from paddock.resources.meta import Key
from paddock.runtime.port import Blueprint
from paddock.settings import Settings
from tests.runtime.local.inside import run
from tests.runtime.local.nodes import TestNode

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(120)]

PORT = 8000
SERVER = """
import socket, sys
family, host = (socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET), sys.argv[1]
listener = socket.socket(family)
listener.bind((host, 8000))
listener.listen()
print("listens", flush=True)
while True:
    connection, _ = listener.accept()
    connection.sendall(host.encode())
    connection.close()
"""


class Said(asyncio.Protocol):
    """Collects received data."""

    def __init__(self) -> None:
        self.text = b""
        self.ended = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.text += data

    def connection_lost(self, problem: Exception | None) -> None:
        self.ended.set_result(None)


@pytest.fixture
async def dialer() -> AsyncIterator[LocalDialer]:
    """A dialer as gateways have one."""
    dialer = LocalDialer(Settings())
    yield dialer
    for connected in dialer._nodes.values():
        connected.close()


@pytest.mark.parametrize("where", ["127.0.0.1", "::1", "0.0.0.0", "its own address"])
async def test_a_server_is_reachable_on_every_listen_address(
    node: TestNode, dialer: LocalDialer, where: str
) -> None:
    """In many languages a bind to `localhost` listens on ::1 only."""
    if where == "::1" and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this kernel knows no IPv6")
    uid = f"ways-{where.replace(':', '').replace('.', '').replace(' ', '-')}"
    box = await node.runtime.create(Blueprint(uid=uid, image="host"))
    try:
        address = box.address.ip if where == "its own address" else where
        started = f"{{ /usr/bin/python3 /tmp/server.py {address} 2>/dev/null & }} | head -1"
        done = await run(box, f"cat >/tmp/server.py <<'END'\n{SERVER}END\n{started}")
        assert done.out == "listens\n", done
        route = Route(
            id=uid,
            key=Key("default", uid),
            uid=uid,
            version=1,
            state=SandboxState.RUNNING,
            ip=box.address.ip,
            node=box.address.node,
        )
        said = Said()

        await dialer.dial(route, PORT, said)  # type: ignore[arg-type]

        await said.ended
        assert said.text.decode() == address
        dialer.forget(route, None)
    finally:
        await node.runtime.destroy(uid)
