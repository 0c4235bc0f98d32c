"""Nothing is lost when connections to the API server break or hang.

All roles connect to the API server through a proxy of the test; the test itself and the kubelet
connect directly. One installation serves all tests, in any order.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
import pytest_asyncio

from paddock.resources.kinds.pods import Pod
from paddock.resources.kinds.sandbox import Phase, Sandbox, SandboxSpec
from paddock.resources.kinds.template import TemplateRef
from paddock.resources.meta import Key, ObjectMeta
from tests.cluster.control_plane import KubeCluster
from tests.on_cluster.world.installation import API_KEY, Installation
from tests.on_cluster.world.light_pods import LightKubelet
from tests.on_cluster.world.proxy import TcpProxy

pytestmark = [
    pytest.mark.kubernetes,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]

SILENCE_SECONDS = 30.0
PATIENCE_SECONDS = 120.0
WATCHES = 2 * (8 + 11 + 1)
"""Watches of two replicas each: API, controllers and gateway."""


class ProxiedInstallation:
    """An installation behind a proxy."""

    def __init__(self, paddock: Installation, proxy: TcpProxy) -> None:
        self.paddock = paddock
        self.proxy = proxy
        self.http = aiohttp.ClientSession(
            headers={"X-API-Key": API_KEY}, timeout=aiohttp.ClientTimeout(total=90)
        )

    async def ask(self, method: str, path: str, body: Any = None, *, replica: int = 0) -> int:
        url = f"http://127.0.0.1:{self.paddock.api_ports[replica]}{path}"
        async with self.http.request(method, url, json=body) as answer:
            self.said = await answer.text()
            return answer.status

    async def made(self, names: list[str]) -> None:
        """Create sandboxes, directly at the API server."""
        for name in names:
            box = Sandbox(
                metadata=ObjectMeta(name=name, namespace="default"),
                spec=SandboxSpec(template_ref=TemplateRef(name="base")),
            )
            await self.paddock.store.create(box)

    async def all_watch(self) -> None:
        """Wait until all processes have their watches through the proxy."""
        await self.paddock.until(lambda: self.proxy.connections >= WATCHES)

    async def all_run(self, names: list[str]) -> bool:
        found = {s.metadata.name: s.status.phase for s in await self.paddock.sandboxes()}
        return all(found.get(name) is Phase.RUNNING for name in names)

    async def all_gone(self, names: list[str]) -> bool:
        pods = await self.paddock.store.list(Pod, namespace="default")
        boxes = await self.paddock.sandboxes()
        left = {item.metadata.name for item in (*pods.items, *boxes)}
        return not left & set(names)

    async def is_known_everywhere(self, sandbox_id: str, status: int) -> bool:
        for replica in range(2):
            if await self.ask("GET", f"/sandboxes/{sandbox_id}", replica=replica) != status:
                return False
        return True


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def installation(own_cluster: KubeCluster) -> AsyncGenerator[ProxiedInstallation]:
    port = urlsplit(own_cluster.info.server).port
    assert port is not None
    async with contextlib.AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(TcpProxy(port).run())
        paddock = await stack.enter_async_context(
            Installation(
                own_cluster.info,
                LightKubelet,
                server=f"https://127.0.0.1:{proxy.port}",
                lease_seconds=8,
            )
        )
        made = ProxiedInstallation(paddock, proxy)
        stack.push_async_callback(made.http.close)
        yield made


async def test_watches_that_are_cut_repeatedly_lose_nothing(
    installation: ProxiedInstallation,
) -> None:
    paddock, proxy = installation.paddock, installation.proxy
    await paddock.stocked(2)
    await installation.all_watch()
    started, ended = len(paddock.kubelet.started), len(paddock.restarts)
    names = [f"cut-{number}" for number in range(12)]
    for first in range(0, 12, 3):
        await installation.made(names[first : first + 3])
        await asyncio.sleep(0.3)
        proxy.cut()
    await paddock.eventually(lambda: installation.all_run(names), PATIENCE_SECONDS)
    once = [name for name in paddock.kubelet.started[started:] if name in names]
    assert sorted(once) == sorted(names), "each pod was made once"

    for name in names:
        await paddock.store.delete(Sandbox, Key("default", name))
        if name.endswith(("3", "7")):
            proxy.cut()
    await paddock.eventually(lambda: installation.all_gone(names), PATIENCE_SECONDS)
    # A process that was cut off during a write may exit; one that only reads must not.
    assert all(name.startswith("controllers-") for name in paddock.restarts[ended:])


async def test_everything_recovers_after_half_a_minute_without_a_network(
    installation: ProxiedInstallation,
) -> None:
    paddock, proxy = installation.paddock, installation.proxy
    await paddock.stocked(2)
    await installation.all_watch()
    assert (
        await installation.ask("POST", "/v2/sandboxes", {"templateID": "base", "timeout": 600})
        == 201
    )
    sandbox_id = (await paddock.store.list(Sandbox, namespace="default")).items
    [claim] = [item.spec.claim for item in sandbox_id if item.spec.claim is not None]
    started = len(paddock.kubelet.started)
    names = [f"dark-{number}" for number in range(6)]
    proxy.hang()
    went_dark = time.monotonic()
    try:
        # Changes during the outage are known only to the API server.
        await installation.made(names)
        victim = (await paddock.idle())[0]
        await paddock.store.delete(Sandbox, victim.key)
        # A client's write fails in time instead of hanging.
        asking = asyncio.create_task(
            installation.ask(
                "POST", "/v2/sandboxes", {"templateID": "base", "timeout": 600}, replica=1
            )
        )
        # Reads from the cache still work.
        assert await installation.ask("GET", f"/sandboxes/{claim.sandbox_id}") == 200
        await asyncio.sleep(SILENCE_SECONDS - (time.monotonic() - went_dark))
    finally:
        proxy.restore()
    assert await asking in (201, 429, 500, 503, 504), installation.said

    await paddock.eventually(lambda: installation.all_run(names), PATIENCE_SECONDS)
    once = [name for name in paddock.kubelet.started[started:] if name in names]
    assert sorted(once) == sorted(names), "each pod was made once"
    await paddock.eventually(
        lambda: installation.all_gone([victim.metadata.name]), PATIENCE_SECONDS
    )
    await paddock.stocked(2)
    await installation.all_watch()
    # Both replicas of the API serve again, and know each other's changes.
    body = {"templateID": "base", "timeout": 600}
    for replica in range(2):
        assert await installation.ask("POST", "/v2/sandboxes", body, replica=replica) == 201, (
            installation.said
        )
    assert await installation.ask("DELETE", f"/sandboxes/{claim.sandbox_id}", replica=1) == 204
    await paddock.eventually(lambda: installation.is_known_everywhere(claim.sandbox_id, 404))
    # No sandbox was claimed twice.
    claims = [s.spec.claim for s in await paddock.sandboxes() if s.spec.claim is not None]
    assert len({item.lock for item in claims}) == len(claims)
    for item in claims:
        await installation.ask("DELETE", f"/sandboxes/{item.sandbox_id}")
    for name in names:
        await paddock.store.delete(Sandbox, Key("default", name))
    await paddock.eventually(lambda: installation.all_gone(names), PATIENCE_SECONDS)
