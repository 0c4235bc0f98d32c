"""Counters of an installation during a benchmark: store writes, cold starts."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp

SANDBOXES = "/apis/paddock.dev/v1alpha1/sandboxes"


async def writes(paddock: Any) -> int:
    """Return the number of the last write: every write of any object has one."""
    page = await paddock.kube("GET", f"{SANDBOXES}?limit=1")
    return int(page["metadata"]["resourceVersion"])


@contextlib.asynccontextmanager
async def cold_starts(paddock: Any) -> AsyncGenerator[set[str]]:
    """Collect the ids of cold sandboxes: they were claimed when they were created."""
    found: set[str] = set()
    since = await writes(paddock)

    async def watch() -> None:
        async with paddock.http.get(
            f"http://127.0.0.1:{paddock.api_port}{SANDBOXES}?watch=true&resourceVersion={since}",
            headers={"Authorization": f"Bearer {paddock.secrets.token}"},
            timeout=aiohttp.ClientTimeout(total=None),
        ) as events:
            async for line in events.content:
                event = json.loads(line)
                claim = event["object"].get("spec", {}).get("claim")
                if event["type"] == "ADDED" and claim:
                    found.add(claim["sandboxId"])

    watching = asyncio.create_task(watch())
    try:
        yield found
        await asyncio.sleep(0.5)  # The last events are still in flight.
        if watching.done():
            watching.result()
            raise RuntimeError("the watch that tells cold sandboxes from warm ones ended")
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
