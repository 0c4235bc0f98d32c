"""kill -9 and SIGSTOP of every process of a real installation, under a storm of real clients.

Node, control plane, gateway, zygote and envds are killed at random, the store's disk is full for a
while, sandboxes fill their disks and misbehave. A client keeps its sandboxes with their files, and
nothing is left in the kernel when all is over. `--faults-minutes` sets the duration, or
`--faults-kills` the number of kills; `--faults-seed` replays the choices, as far as real time
allows.
"""

import asyncio
import os
import random
import signal
import time

import pytest

from paddock.kit.tasks import background
from tests.faults.clients import replayed_by
from tests.faults.real import (
    MARK,
    MISDEEDS,
    ROLES,
    TROUBLE,
    FaultInjector,
    Storm,
    envd_of,
    facts,
    instances,
    make_small_template,
    only_warm_stock_is_left,
    pid_of,
    uid_of,
)
from tests.faults.test_control_plane_killed import nothing_is_left, settled
from tests.installation import Installation
from tests.runtime.local.nodes import eventually

SANDBOXES = "/apis/paddock.dev/v1alpha1/sandboxes"
MEANWHILE_SECONDS = 10
"""Within this time requests to other processes are answered, on a busy machine."""
END_SECONDS = 10
"""From the kill request until no process of the sandbox runs, whatever it does; a fifth of a second
on an idle machine.
"""
pytestmark = [pytest.mark.faults, pytest.mark.sandbox, pytest.mark.timeout(3600)]

SLOWEST_SECONDS = 600
"""How long a slow machine may take to kill one of each role."""
LIVELY = 10
"""A storm with fewer answered requests proves nothing."""


async def test_random_kills_of_every_process_lose_nothing(
    faults_seconds: float, faults_kills: int, faults_seed: int
) -> None:
    dice = random.Random(faults_seed)
    with replayed_by(f"--faults-seed {faults_seed}"):
        await _storm(dice, faults_seconds, faults_kills, faults_seed)


async def _storm(dice: random.Random, seconds: float, kills: int, seed: int) -> None:
    async with Installation(pool_size=2, store_disk_mb=24) as paddock:
        storm = Storm(paddock, seed, can_fill=await make_small_template(paddock))
        harm = FaultInjector(paddock, dice)
        async with background(storm.run(), name="storm") as running:
            end = time.monotonic() + seconds
            most = time.monotonic() + max(seconds, SLOWEST_SECONDS)
            while harm.kills < kills if kills else time.monotonic() < end or harm.untouched_roles:
                await asyncio.sleep(dice.random() * 1.2)
                await harm.do()
                assert kills or time.monotonic() < most, f"{harm.untouched_roles} cannot be killed"
            # On a slow machine starting processes may have taken most of that time.
            await eventually(lambda: storm.acknowledged > LIVELY, seconds=300)
            storm.is_over = True
            await running
        violations = await storm.check_all()
        said = (
            f"seed {seed}: {harm.kills} kills, {len(violations)} violations; "
            f"{dict(harm.did)}; clients did {dict(storm.did)}"
        )
        print(said)
        assert not violations, "\n".join((said, *violations))
        await settled(paddock)
        assert not await storm.killed_but_present()
        await nothing_is_left(paddock)
        await only_warm_stock_is_left(paddock)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("role", ROLES)
async def test_a_stopped_process_affects_only_its_own_requests_and_resumes(
    role: str, hung: Installation, faults_seed: int
) -> None:
    paddock, dice = hung, random.Random(faults_seed)
    box, neighbour = await paddock.create(timeout=600), await paddock.create(timeout=600)
    for one in (box, neighbour):
        await paddock.write_file(one, MARK, b"mine")
    pid = await (envd_of(paddock, box) if role == "envd" else pid_of(paddock, role, dice))
    assert pid
    os.kill(pid, signal.SIGSTOP)
    try:
        async with asyncio.timeout(MEANWHILE_SECONDS):
            if role == "gateway-0":
                assert (await paddock.kube("GET", SANDBOXES))["items"]
            else:
                asked = neighbour if role == "envd" else box
                assert await paddock.run(asked, f"cat {MARK}") == "mine"
    finally:
        os.kill(pid, signal.SIGCONT)

    async def answers() -> bool:
        try:
            async with asyncio.timeout(5):
                return await paddock.run(box, f"cat {MARK}") == "mine"
        except TROUBLE:
            return False

    await eventually(answers, seconds=90)
    for one in (box, neighbour):
        await paddock.api("DELETE", f"/sandboxes/{one.id}")


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("misdeed", MISDEEDS)
async def test_a_sandbox_that_misbehaves_is_killed_like_any_other(
    misdeed: str, hung: Installation
) -> None:
    box, neighbour = await hung.create(timeout=600), await hung.create(timeout=600)
    uid = await uid_of(hung, box)
    assert uid in (await facts(hung))["inits"]
    misbehaving = asyncio.ensure_future(hung.run(box, MISDEEDS[misdeed]))
    await asyncio.sleep(1)
    async with asyncio.timeout(MEANWHILE_SECONDS):
        assert await hung.run(neighbour, "echo here") == "here\n"

    async def is_gone() -> bool:
        return uid not in {item.uid for item in await instances(hung)}

    async with asyncio.timeout(END_SECONDS):
        await hung.api("DELETE", f"/sandboxes/{box.id}")
        await eventually(is_gone, seconds=END_SECONDS)
    misbehaving.cancel()
    await asyncio.wait((misbehaving,))
    await hung.api("DELETE", f"/sandboxes/{neighbour.id}")
