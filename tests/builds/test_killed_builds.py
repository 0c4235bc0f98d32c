"""Builds whose control plane or node is killed in a random step: each goes on, nothing leaks."""

import asyncio
import os
import random
from collections.abc import Mapping
from typing import Any

import pytest

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


@pytest.mark.parametrize("victim", ["control", "node"])
def test_a_build_goes_on_after_a_kill_and_leaves_nothing(victim: str) -> None:
    async def scenario() -> None:
        async with Installation(pool_size=1) as paddock:
            builder = Builder(paddock)
            for seed in SEEDS:
                await one_kill(builder, victim, seed)

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
        startCommand="exec python3 -m http.server 8000 --directory /home/user",
        readyCommand="curl -sf localhost:8000",
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
    box = await paddock.create(templateID=template, timeout=60)
    lines = "".join(f"{number}\n" for number in range(COUNT))
    assert await paddock.call(box, 8000, "/steps") == (200, lines.encode())
    await paddock.api("DELETE", f"/sandboxes/{box.id}")
