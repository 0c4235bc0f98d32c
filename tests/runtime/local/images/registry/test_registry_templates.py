"""A template whose image is in a registry, from the first pull to the commands of a sandbox."""

import asyncio
import os
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.installation import Installation
from tests.runtime.local.images.registry.relay import Relay
from tests.runtime.local.images.registry.servers import Registry
from tests.runtime.local.images.registry.small_images import CHECK, publish, small_root
from tests.runtime.local.nodes import eventually

pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.timeout(240),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes with checkpoints need root"),
]
API = "/apis/paddock.dev/v1alpha1/namespaces/default"
EVENTS = "/api/v1/namespaces/default/events"
MERGE = "application/merge-patch+json"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def relay(server: Registry) -> AsyncGenerator[Relay]:
    async with Relay(server) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def paddock(relay: Relay) -> AsyncGenerator[Installation]:
    async with Installation(pool_size=1, registry_private_hosts=relay.host) as running:
        yield running


async def test_an_image_is_pulled_pinned_pooled_claimed_and_run(
    paddock: Installation, relay: Relay, server: Registry, tmp_path: Path
) -> None:
    root = small_root(tmp_path)
    first = publish(server, root, "tools:1", mark="the first")
    name = f"{relay.host}/{first.name}"
    held = relay.hold(first.blob_path(1), after=1 << 20)
    await apply(paddock, "sandboxtemplates", "SandboxTemplate", {"image": name})
    await apply(
        paddock, "sandboxpools", "SandboxPool", {"templateRef": {"name": "tools"}, "replicas": 1}
    )
    async with asyncio.timeout(60):
        await held.reached.wait()

    # While it is pulled, the sandbox says so.
    waiting = await eventually(lambda: waits_for_image(paddock), seconds=30)
    assert waiting["reason"] == "Pulling"
    assert waiting["message"].startswith(f"pulling image '{name}'")
    held.release.set()
    sandbox = await eventually(lambda: stocked(paddock), seconds=90)

    # The version that was pulled is pinned.
    digest = (await paddock.kube("GET", f"{API}/sandboxtemplates/tools"))["status"]["imageDigest"]
    assert digest.startswith("sha256:")
    assert sandbox["status"]["imageDigest"] == digest
    assert [item["status"] for item in image_conditions(sandbox)] == ["True"]
    texts = [item["message"] for item in (await paddock.kube("GET", EVENTS))["items"]]
    assert f"pulling image '{name}'" in texts
    assert any(text.startswith(f"pulled image '{name}' ({digest})") for text in texts), texts
    assert await claimed(paddock) == first.prints

    # A tag that moves changes nothing, and costs no request.
    publish(server, root, "tools:1", mark="the moved one")
    await eventually(lambda: stocked(paddock), seconds=60)
    before = len(relay.requests)
    assert await claimed(paddock) == first.prints
    await eventually(lambda: stocked(paddock), seconds=60)
    assert len(relay.requests) == before

    # Another image replaces the idle sandboxes.
    second = publish(server, root, "tools:2", mark="the second")
    change = {"spec": {"image": f"{relay.host}/{second.name}"}}
    await paddock.kube("PATCH", f"{API}/sandboxtemplates/tools", change, kind=MERGE)

    async def is_replaced() -> bool:
        found = await stocked(paddock)
        return bool(found) and found["status"].get("imageDigest", digest) != digest

    await eventually(is_replaced, seconds=90)
    assert await claimed(paddock) == second.prints


async def apply(paddock: Installation, plural: str, kind: str, spec: dict[str, Any]) -> None:
    """Create an object with the name `tools`."""
    body = {
        "apiVersion": "paddock.dev/v1alpha1",
        "kind": kind,
        "metadata": {"name": "tools"},
        "spec": spec,
    }
    await paddock.kube("POST", f"{API}/{plural}", body)


async def pooled(paddock: Installation) -> list[dict[str, Any]]:
    """Return the unclaimed sandboxes of the pool."""
    found = await paddock.kube("GET", f"{API}/sandboxes?labelSelector=paddock.dev/pool%3Dtools")
    return [item for item in found["items"] if "claim" not in item["spec"]]


def image_conditions(sandbox: dict[str, Any]) -> list[dict[str, Any]]:
    conditions = sandbox.get("status", {}).get("conditions", [])
    return [item for item in conditions if item["type"] == "ImagePulled"]


async def waits_for_image(paddock: Installation) -> dict[str, Any] | None:
    """Return the condition of the sandbox whose image is pulled."""
    for sandbox in await pooled(paddock):
        for condition in image_conditions(sandbox):
            return condition
    return None


async def stocked(paddock: Installation) -> dict[str, Any] | None:
    """Return the only sandbox of the pool, once it is available."""
    pool = await paddock.kube("GET", f"{API}/sandboxpools/tools")
    members = await pooled(paddock)
    is_full = pool.get("status", {}).get("available", 0) == 1
    return members[0] if is_full and len(members) == 1 else None


async def claimed(paddock: Installation) -> str:
    """Return what a sandbox of the template prints of its content."""
    box = await paddock.create(templateID="tools", timeout=60)
    try:
        return await paddock.run(box, CHECK)
    finally:
        await paddock.api("DELETE", f"/sandboxes/{box.id}")
