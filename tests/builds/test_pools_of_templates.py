"""Pools of built templates: they follow the newest build, and a pool of size 0 costs no sandbox."""

import asyncio
import os
from collections.abc import AsyncGenerator
from typing import Any

import pytest
import pytest_asyncio

from paddock.kit.tasks import background
from tests.builds.real import API, Builder, run
from tests.installation import Installation
from tests.runtime.local.nodes import eventually

pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.timeout(240),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes with checkpoints need root"),
]
SERVER = "exec python3 -m http.server 8000 --directory /home/user"
READY = "curl -sf localhost:8000"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def builder() -> AsyncGenerator[Builder]:
    async with Installation(pool_size=1) as paddock:
        yield Builder(paddock)


async def build(builder: Builder, template: str, version: str) -> None:
    """Build a version of a template that serves its version."""
    step = run(f"echo {version} > version")
    await builder.build(template, step, startCommand=SERVER, readyCommand=READY)


async def create_pool(builder: Builder, name: str, template: str, **spec: Any) -> None:
    body = {
        "apiVersion": "paddock.dev/v1alpha1",
        "kind": "SandboxPool",
        "metadata": {"name": name},
        "spec": {"templateRef": {"name": template}, **spec},
    }
    await builder.paddock.kube("POST", f"{API}/sandboxpools", body)


async def status_of(builder: Builder, name: str) -> dict[str, Any]:
    return (await builder.paddock.kube("GET", f"{API}/sandboxpools/{name}")).get("status", {})


async def members(builder: Builder, name: str) -> list[dict[str, Any]]:
    """Return the idle sandboxes of a pool."""
    query = f"labelSelector=paddock.dev/pool%3D{name}"
    found = (await builder.paddock.kube("GET", f"{API}/sandboxes?{query}"))["items"]
    return [item for item in found if "claim" not in item["spec"]]


async def claimed(builder: Builder, template: str) -> tuple[str, str]:
    """Return the version that a new sandbox serves, and the name of the sandbox."""
    paddock = builder.paddock
    box = await paddock.create(templateID=template, timeout=120)
    try:
        status, version = await paddock.call(box, 8000, "/version")
        assert status == 200, version
        found = (await paddock.kube("GET", f"{API}/sandboxes"))["items"]
        [name] = [
            item["metadata"]["name"]
            for item in found
            if item["spec"].get("claim", {}).get("sandboxId") == box.id
        ]
        return version.decode().strip(), name
    finally:
        await paddock.api("DELETE", f"/sandboxes/{box.id}")


class Claims:
    """Clients that claim sandboxes of a template all the time."""

    def __init__(self, builder: Builder, template: str) -> None:
        self.versions: list[str] = []
        self.is_over = False
        self._builder = builder
        self._template = template

    async def run(self) -> None:
        """Claim until it is over. Raises what a claim raises."""
        while not self.is_over:
            version, _ = await claimed(self._builder, self._template)
            self.versions.append(version)


async def test_a_pool_follows_a_new_build_and_no_claim_fails_meanwhile(builder: Builder) -> None:
    await build(builder, "rolling", "1")
    await create_pool(builder, "rolling-warm", "rolling", replicas=3)

    async def is_warm() -> bool:
        return (await status_of(builder, "rolling-warm")).get("available", 0) == 3

    await eventually(is_warm, seconds=90)
    first = {item["metadata"]["name"] for item in await members(builder, "rolling-warm")}
    version, name = await claimed(builder, "rolling")
    assert version == "1"
    assert name in first, "the claim did not get a warm sandbox"

    claims = Claims(builder, "rolling")
    async with background(claims.run(), name="claims") as running:
        await eventually(lambda: running.done() or len(claims.versions) >= 2, seconds=60)
        await build(builder, "rolling", "2")
        await eventually(lambda: running.done() or "2" in claims.versions, seconds=90)
        claims.is_over = True
        await running
    assert set(claims.versions) == {"1", "2"}

    async def is_replaced() -> bool:
        names = {item["metadata"]["name"] for item in await members(builder, "rolling-warm")}
        status = await status_of(builder, "rolling-warm")
        # The status follows the list: that of a moment ago may count replaced members.
        are_new = status.get("available", 0) == status.get("updatedAvailable", 0) == 3
        return are_new and len(names) == 3 and not names & first

    await eventually(is_replaced, seconds=90)
    warm = {item["metadata"]["name"] for item in await members(builder, "rolling-warm")}
    version, name = await claimed(builder, "rolling")
    assert version == "2"
    assert name in warm, "the claim did not get a warm sandbox"


@pytest.mark.parametrize("most", [0, 2])
async def test_a_pool_of_size_0_creates_nothing_ahead_and_serves_claims(
    builder: Builder, most: int
) -> None:
    template, pool = f"on-demand-{most}", f"on-demand-pool-{most}"
    await build(builder, template, "1")
    capacity = {"bufferMin": 0, "bufferMax": most, "poolMin": 0, "poolMax": 10}
    await create_pool(builder, pool, template, capacity=capacity)

    async def is_observed() -> bool:
        return "observedGeneration" in await status_of(builder, pool)

    await eventually(is_observed, seconds=30)
    results = await asyncio.gather(*(claimed(builder, template) for _ in range(3)))
    assert [version for version, _ in results] == ["1", "1", "1"]
    assert len({name for _, name in results}) == 3
    # Not even after claims: the pool has no idle sandbox.
    assert await members(builder, pool) == []
    assert (await status_of(builder, pool)).get("available", 0) == 0
    # A new build needs no replacement.
    await build(builder, template, "2")
    assert (await claimed(builder, template))[0] == "2"
    assert await members(builder, pool) == []
