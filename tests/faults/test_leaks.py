"""Long runs leak nothing: descriptors, threads and tasks of every process, and kernel objects, are
as many after hundreds of operations as after the first ones.

Growth is measured between two equal amounts of work, not since the start: connection pools and
caches fill once.
"""

import asyncio
import contextlib
import re
import time
from pathlib import Path

import pytest

from paddock.runtime.local.driver import LocalRuntime
from paddock.runtime.local.node.node_context import NodeSettings
from tests.faults.real import facts
from tests.installation import Installation
from tests.runtime.local.nodes import eventually, traces

pytestmark = [pytest.mark.faults, pytest.mark.sandbox, pytest.mark.timeout(480)]

ROUNDS = 12
SLACK = 3
"""Tolerated growth: a connection that is just being reused."""
PATIENCE_SECONDS = 90
"""Wait for connections that are kept for a minute after their last use."""
PARKED = NodeSettings.__struct_defaults__[0]
"""Number of warm sandboxes that a node keeps."""
PROCESSES = ("node", "control", "gateway-0", "zygote")


async def live(paddock: Installation, number: int) -> None:
    """One complete lifecycle of a sandbox."""
    box = await paddock.create(timeout=600, autoPause=True, autoResume={"enabled": True})
    await paddock.write_file(box, "/home/user/file", b"content")
    await paddock.api("POST", f"/sandboxes/{box.id}/pause")
    assert await paddock.run(box, "cat /home/user/file") == "content"
    if number % 2 == 0:  # More often than the tolerated growth.
        snapshot = await paddock.api("POST", f"/sandboxes/{box.id}/snapshots", {})
        clone = await paddock.create(timeout=600, templateID=snapshot["snapshotID"])
        assert await paddock.run(clone, "cat /home/user/file") == "content"
        await paddock.api("DELETE", f"/sandboxes/{clone.id}")
        await paddock.api("DELETE", f"/templates/{snapshot['snapshotID']}")
    await paddock.api("DELETE", f"/sandboxes/{box.id}")


async def counted(paddock: Installation) -> dict[str, int]:
    """What every process has open when all that was created is gone."""
    await paddock.stocked()
    await _all_gone(paddock)
    pids = {name: paddock.pid(name) for name in PROCESSES if name != "zygote"}
    pids["zygote"] = (await facts(paddock))["zygote"]
    found: dict[str, int] = {}
    for name, pid in pids.items():
        found[f"{name} descriptors"] = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        found[f"{name} threads"] = len(list(Path(f"/proc/{pid}/task").iterdir()))
    for name, port, path in (
        ("control", paddock.api_port, "/metrics"),
        ("gateway-0", paddock.admin_ports[0], "/metrics"),
    ):
        headers = {"Authorization": f"Bearer {paddock.secrets.token}"}
        async with paddock.http.get(f"http://127.0.0.1:{port}{path}", headers=headers) as answer:
            text = await answer.text()
        tasks = re.search(r"^paddock_tasks (\d+)", text, re.MULTILINE)
        assert tasks is not None, f"{name} does not say how many tasks it has: {text[:200]}"
        found[f"{name} tasks"] = int(tasks[1])
    kernel = traces(paddock.node_state, paddock._number)
    found |= {f"the kernel's {what}": len(items) for what, items in kernel.items()}
    found["network namespaces"] = len(_namespaces(kernel["processes"]))
    return found


def _namespaces(pids: list[str]) -> set[str]:
    found: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            found.add(str(Path(f"/proc/{pid}/ns/net").readlink()))
    return found


async def _all_gone(paddock: Installation) -> None:
    """Wait until only the stock is left and nothing is being created for it."""
    node = LocalRuntime(paddock.directory / "run" / "node.sock")
    looks: list[int] = []

    async def quiet() -> bool:
        looks.append((await facts(paddock))["warm"])
        if len(await node.instances()) != paddock.settings["pool_size"]:
            looks.clear()
        # A slow machine takes a while for each warm sandbox.
        needed = 4 if looks and looks[-1] >= PARKED else 12
        return len(looks) > needed and len(set(looks[-needed:])) == 1

    try:
        await eventually(quiet, seconds=90, pause=0.5)
    finally:
        node.close()


async def test_many_operations_leak_nothing() -> None:
    async with Installation(pool_size=2) as paddock:
        for number in range(ROUNDS):
            await live(paddock, number)
        before = await counted(paddock)
        for number in range(ROUNDS):
            await live(paddock, number)
        # Idle connections close by themselves after a while; leaks do not.
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (
            grown := grown_since(before, await counted(paddock))
        ) and time.monotonic() < deadline:
            await asyncio.sleep(1)
    assert not grown, grown


def grown_since(before: dict[str, int], after: dict[str, int]) -> dict[str, str]:
    print(after)
    return {
        name: f"{before[name]} -> {count}"
        for name, count in after.items()
        if count > before[name] + SLACK
    }
