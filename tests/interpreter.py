"""The template of the code interpreter in a test installation, and calls of its server."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.installation import Box, Installation
from tests.runtime.local.nodes import eventually

TEMPLATE = "code-interpreter-v1"
PORT = 49999
WHEELS = Path(os.environ.get("PADDOCK_CACHE", "/var/cache/paddock")) / "interpreter" / "wheels"
"""Packages of the lock files: `scripts/install-interpreter`."""
_POOL = f"/apis/paddock.dev/v1alpha1/namespaces/default/sandboxpools/{TEMPLATE}"
_INSTALL_SECONDS = 400


def require_wheels() -> None:
    """Skip the test if the packages of the code interpreter are not in the cache."""
    if not any(WHEELS.glob("*.whl")):
        pytest.skip("packages of the code interpreter are missing: run scripts/install-interpreter")


async def install_template(paddock: Installation, *options: str) -> str:
    """Run `paddock template install code-interpreter` with the packages of the cache."""
    words = ("template", "install", "code-interpreter", "--progress", "plain", "--wheels", WHEELS)
    process = await asyncio.create_subprocess_exec(
        Path(sys.executable).with_name("paddock"),
        *map(str, (*words, *options)),
        env=paddock.environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    async with asyncio.timeout(_INSTALL_SECONDS):
        output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()[-4000:]
    return output.decode()


async def pool_of(paddock: Installation, size: int) -> None:
    """Set the number of warm sandboxes, and wait until they are there."""
    body = {"spec": {"replicas": size}}
    await paddock.kube("PATCH", _POOL, body, kind="application/merge-patch+json")

    async def full() -> bool:
        status = (await paddock.kube("GET", _POOL)).get("status", {})
        return status.get("available", 0) == size

    await eventually(full, seconds=300)


async def run_code(paddock: Installation, box: Box, code: str, **request: Any) -> list[Any]:
    """Run code as the SDK does; return the events of the stream."""
    body = {"code": code, "context_id": None, "language": None, "env_vars": None, **request}
    status, data = await paddock.call(box, PORT, "/execute", method="POST", json=body)
    assert status == 200, (status, data[-2000:])
    return [msgspec.json.decode(line) for line in data.splitlines()]


def text_of(events: list[Any]) -> str | None:
    """Return the value of the last expression."""
    return next((item.get("text") for item in events if item.get("is_main_result")), None)
