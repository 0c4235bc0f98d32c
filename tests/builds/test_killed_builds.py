"""Builds whose control plane or node is killed in a random step, or while the node stores a layer
or the memory: each goes on, nothing leaks.
"""

import asyncio
import os
import random
import signal
from collections.abc import Mapping
from typing import Any

import pytest

from tests.builds.leftovers import nothing_is_left
from tests.builds.real import SECONDS, Builder, run
from tests.installation import Installation

pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.faults,
    pytest.mark.timeout(480),
    pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes with checkpoints need root"),
]
SEEDS = (1, 2)
COUNT = 6
SERVER = {
    "startCommand": "exec python3 -m http.server 8000 --directory /home/user",
    "readyCommand": "curl -sf localhost:8000",
}
STORING = """
import os, signal
from paddock.runtime.local.sandbox.checkpoint_records import CheckpointRecords

async def write(self, *args, has_memory, real=CheckpointRecords.write, **more):
    if has_memory is {has_memory}:
        os.kill(os.getpid(), signal.SIGKILL)
    return await real(self, *args, has_memory=has_memory, **more)

CheckpointRecords.write = write
"""
"""Kills a node that has stored the files of a layer, or its memory, too, before it is recorded."""


@pytest.mark.parametrize("victim", ["control", "node"])
def test_a_build_goes_on_after_a_kill_and_leaves_nothing(victim: str) -> None:
    async def scenario() -> None:
        async with Installation(pool_size=1) as paddock:
            builder = Builder(paddock)
            for seed in SEEDS:
                await one_kill(builder, victim, seed)
            await nothing_is_left(builder)

    asyncio.run(scenario())


async def has_begun(builder: Builder, build: Mapping[str, Any], step: int) -> None:
    """Wait until a step of a build has begun."""
    async with asyncio.timeout(SECONDS):
        while not any(f"[builder {step}/{COUNT}] RUN" in text for text in builder.messages(build)):
            await asyncio.sleep(0.02)


async def one_kill(builder: Builder, victim: str, seed: int) -> None:
    """Kill a process at a moment of the build, start it again, and check the result."""
    template = f"killed-{seed}"
    steps = [run(f"sleep 0.2; echo {number} >> steps # {seed}") for number in range(COUNT)]
    build = await builder.start(
        template,
        *steps,
        **SERVER,
    )
    step = random.Random(seed).randint(1, COUNT)
    await has_begun(builder, build, step)
    assert (await builder.get(build))["status"]["phase"] == "Building"
    paddock = builder.paddock
    paddock.kill(victim)
    await (paddock.start_control() if victim == "control" else paddock.start_node())
    status = await builder.end(build)
    assert status["phase"] == "Ready", (status, builder.messages(build))
    await builder.no_sandboxes()
    await serves(builder, template, COUNT)


async def serves(builder: Builder, template: str, count: int) -> None:
    """Check a sandbox of the template: each step has run once, and the server is running."""
    box = await builder.paddock.create(templateID=template, timeout=60)
    lines = "".join(f"{number}\n" for number in range(count))
    assert await builder.paddock.call(box, 8000, "/steps") == (200, lines.encode())
    await builder.paddock.api("DELETE", f"/sandboxes/{box.id}")


def test_a_build_goes_on_after_its_node_is_killed_while_it_stores_and_leaves_nothing() -> None:
    async def scenario() -> None:
        async with Installation(pool_size=1) as paddock:
            builder = Builder(paddock)
            for has_memory in (False, True):
                await one_kill_while_storing(builder, has_memory=has_memory)
            await nothing_is_left(builder)

    asyncio.run(scenario())


async def one_kill_while_storing(builder: Builder, *, has_memory: bool) -> None:
    """Let the node kill itself when it has stored a layer or the memory, and check the result."""
    paddock, template = builder.paddock, f"storing-{'memory' if has_memory else 'layer'}"
    paddock.kill("node")
    await paddock.start_node(STORING.format(has_memory=has_memory))
    steps = [run(f"echo {number} >> steps # {template}") for number in range(2)]
    build = await builder.start(template, *steps, **SERVER)
    assert await paddock.ended("node", SECONDS) == -signal.SIGKILL
    await paddock.start_node()
    status = await builder.end(build)
    assert status["phase"] == "Ready", (status, builder.messages(build))
    await serves(builder, template, 2)
