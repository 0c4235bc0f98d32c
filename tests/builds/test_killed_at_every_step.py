"""A control plane that is killed at every step of a build: the build goes on or ends with a reason,
and neither a sandbox nor a layer is left.

Each moment has a control plane of its own, which continues from what the killed one before it has
left. `--faults-kills` adds kills at random moments of further builds, from `--faults-seed`.
"""

import contextlib
import os
import random
import signal
import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from tests.builds.kill_points import DELETION, FAILURE, SUCCESS, prelude
from tests.builds.leftovers import nothing_is_left
from tests.builds.real import API, Builder, run
from tests.faults.clients import replayed_by, seed_of
from tests.installation import Installation
from tests.runtime.local.nodes import eventually

pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.faults,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes with checkpoints need root"),
]
SERVER = "exec python3 -m http.server 8000 --directory /home/user"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def builder() -> AsyncGenerator[Builder]:
    async with Installation(pool_size=1) as paddock:
        yield Builder(paddock)


class Victim:
    """One build, and the control planes that are killed while they work on it."""

    def __init__(self, builder: Builder, template: str, *steps: str, **spec: Any) -> None:
        self.paddock = builder.paddock
        self.template = template
        self.name = str(uuid.uuid4())
        self._builder = builder
        self._steps = [run(step) for step in steps]
        self._spec = spec

    @property
    def path(self) -> str:
        return f"{API}/templatebuilds/{self.name}"

    async def start(self) -> None:
        """Start the build; the reply is lost if the control plane is killed meanwhile."""
        with contextlib.suppress(aiohttp.ClientError):
            await self._builder.start(self.template, *self._steps, name=self.name, **self._spec)

    async def delete(self) -> None:
        """Delete the build; the reply may be lost."""
        with contextlib.suppress(aiohttp.ClientError):
            await self.paddock.kube("DELETE", self.path)

    async def live_until(self, moment: str, action: Any = None) -> None:
        """Run a control plane that is killed at a moment."""
        began = time.monotonic()
        self.paddock.spawn_control(prelude(moment))
        if action is not None:
            await self.paddock.control_serves()
            await action()
        status = await self.paddock.ended("control")
        assert status == -signal.SIGKILL, (moment, status, self.paddock.log("control")[-3000:])
        print(f"killed at {moment!r} after {time.monotonic() - began:.1f} s")

    async def end(self) -> dict[str, Any]:
        """Run a control plane to the end of the build, and return the status of the build."""
        await self.paddock.start_control()
        return await self._builder.end({"metadata": {"name": self.name}})


async def test_a_build_goes_on_from_every_step_at_which_its_control_plane_is_killed(
    builder: Builder, request: pytest.FixtureRequest
) -> None:
    kills, seed = int(request.config.getoption("--faults-kills")), seed_of(request)
    steps = ("echo step 1 | tee steps", "echo step 2 | tee -a steps")
    victim = Victim(builder, "killed", *steps, startCommand=SERVER, readyCommand=_ready())
    await builder.ensure_template("killed")
    builder.paddock.kill("control")
    for number, moment in enumerate(SUCCESS):
        await victim.live_until(moment, victim.start if not number else None)
    status = await victim.end()
    assert status["phase"] == "Ready", status
    await serves(builder, "killed")
    dice = random.Random(seed)
    with replayed_by(f"--faults-kills {kills} --faults-seed {seed}"):
        for number in range(kills):
            await one_more(builder, f"killed-{number}", dice.choice(sorted(SUCCESS)))
    await nothing_is_left(builder)


async def one_more(builder: Builder, template: str, moment: str) -> None:
    """Kill the control plane at one moment of another build."""
    steps = (f"echo step 1 | tee steps # {template}", "echo step 2 | tee -a steps")
    victim = Victim(builder, template, *steps, startCommand=SERVER, readyCommand=_ready())
    await builder.ensure_template(template)
    builder.paddock.kill("control")
    await victim.live_until(moment, victim.start)
    status = await victim.end()
    assert status["phase"] == "Ready", (moment, status)
    await serves(builder, template)


async def test_a_failing_build_ends_with_its_reason_wherever_its_control_plane_is_killed(
    builder: Builder,
) -> None:
    victim = Victim(builder, "failing", "echo fine", "exit 3")
    await builder.ensure_template("failing")
    builder.paddock.kill("control")
    for number, moment in enumerate(FAILURE):
        await victim.live_until(moment, victim.start if not number else None)
    status = await victim.end()
    assert (status["phase"], status["failedStep"]) == ("Failed", "2")
    assert status["message"] == "failed to run command 'exit 3': exit status 3"
    await nothing_is_left(builder)


async def test_a_deleted_build_is_gone_wherever_its_control_plane_is_killed(
    builder: Builder,
) -> None:
    victim = Victim(builder, "deleted", "sleep 300")
    await victim.start()
    build = await builder.until(
        {"metadata": {"name": victim.name}}, lambda status: status.get("phase") == "Building"
    )
    builder.paddock.kill("control")
    for number, moment in enumerate(DELETION):
        await victim.live_until(moment, victim.delete if not number else None)
    await builder.paddock.start_control()

    async def is_gone() -> bool:
        found = await builder.paddock.kube("GET", f"{API}/templatebuilds")
        return victim.name not in {item["metadata"]["name"] for item in found["items"]}

    await eventually(is_gone, seconds=60)
    await nothing_is_left(builder)
    assert not builder.logs(build["metadata"]["uid"])


def _ready() -> str:
    return "curl -sf localhost:8000"


async def serves(builder: Builder, template: str) -> None:
    """Check a sandbox of the template: each step has run once, and the server is running."""
    box = await builder.paddock.create(templateID=template, timeout=60)
    try:
        assert await builder.paddock.call(box, 8000, "/steps") == (200, b"step 1\nstep 2\n")
    finally:
        await builder.paddock.api("DELETE", f"/sandboxes/{box.id}")
