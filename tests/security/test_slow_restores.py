"""One team's slow restores and dumps: another team's sandbox wakes almost as fast as ever.

A restore takes long if the stored processes have very many memory mappings. `--security-full` is
the attack in full size, some minutes.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator

import pytest

from paddock.kit.errors import ConflictError
from paddock.runtime.local.kernel.cgroups import Cgroups
from paddock.runtime.port import AgentConfig, Blueprint, Instance, InstanceState, Limits
from tests.runtime.local.inside import begin, run
from tests.runtime.local.nodes import TestNode, eventually

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(900)]

SLOW, OTHER = AgentConfig(team="slow"), AgentConfig(team="other")
LEAST_CPU_SECONDS = 0.15
"""A dump in another cgroup leaves a tenth of it in that of the sandbox."""
MAPPINGS = """
import ctypes, os, time
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
def fill():
    for number in range({mappings}):
        # Neighbours of different protection are not merged.
        libc.mmap(None, 4096, 1 + 2 * (number % 2), 0x22, -1, 0)
for _ in range({processes} - 1):
    if os.fork() == 0:
        break
fill()
open(f"/tmp/full-{{os.getpid()}}", "w")
time.sleep(10**6)
"""


@pytest.fixture
def size(request: pytest.FixtureRequest) -> tuple[int, int]:
    """Processes, and mappings of each."""
    return (16, 60_000) if request.config.getoption("--security-full") else (8, 30_000)


@pytest.fixture
async def slow(node: TestNode, box, size: tuple[int, int]) -> Instance:
    """A sandbox whose restore takes long."""
    processes, mappings = size
    made = await box(agent=SLOW, limits=Limits(memory_bytes=2 << 30))
    program = MAPPINGS.format(processes=processes, mappings=mappings)
    await begin(made, f"exec python3 -c '{program}'")

    async def is_full() -> bool:
        return (await run(made, "ls /tmp/full-* | wc -l")).out.strip() == str(processes)

    await eventually(is_full, seconds=120, pause=0.2)
    return made


async def _wake_seconds(node: TestNode, uid: str) -> float:
    began = time.monotonic()
    woken = await node.runtime.restore(uid)
    assert woken.state is InstanceState.RUNNING
    return time.monotonic() - began


@contextlib.asynccontextmanager
async def _slow_restores(
    node: TestNode, slow: Instance
) -> AsyncGenerator[list[asyncio.Task[Instance]]]:
    """Run four slow restores of one team, of which some wait for their turn."""
    await node.runtime.snapshot(slow.uid, "slow-state", memory=True, keep_running=True)
    uids = [f"slow-{number}" for number in range(4)]
    creates = [
        asyncio.create_task(
            node.runtime.create(Blueprint(uid=uid, agent=SLOW, checkpoint_id="slow-state"))
        )
        for uid in uids
    ]

    async def some_wait() -> bool:
        report = {one.kind: one for one in await node.runtime.heavy_work()}
        return report["fork"].running > 0 and report["fork"].waiting > 0

    try:
        await eventually(some_wait)
        yield creates
    finally:
        await asyncio.gather(*creates, return_exceptions=True)
        for uid in uids:
            await node.runtime.destroy(uid)
        await node.runtime.delete_checkpoint("slow-state")


async def test_slow_restores_do_not_delay_another_team(node: TestNode, box, slow) -> None:
    other = await box(agent=OTHER)
    await node.runtime.hibernate(other.uid)
    usual = await _wake_seconds(node, other.uid)
    await node.runtime.hibernate(other.uid)
    async with _slow_restores(node, slow) as creates:
        seconds = [await _wake_seconds(node, other.uid)]
        for _ in range(2):
            await node.runtime.hibernate(other.uid)
            seconds.append(await _wake_seconds(node, other.uid))
        # The least: one sample may also have waited for other work of the machine.
        assert min(seconds) < max(10 * usual, 0.6)
        assert not any(create.done() for create in creates), "the restores were not slow"
        for made in await asyncio.gather(*creates):
            assert made.state is InstanceState.RUNNING


async def test_dump_and_restore_use_the_cpu_time_of_the_sandbox(node: TestNode, slow) -> None:
    cgroups = Cgroups((await node.facts())["node_id"])

    def used() -> dict[str, float]:
        return {name: cgroups.cpu_seconds(name) for name in cgroups.names()}

    def most_used_since(before: dict[str, float]) -> float:
        return max(seconds - before.get(name, 0.0) for name, seconds in used().items())

    before = used()
    await node.runtime.snapshot(slow.uid, "cpu-state", memory=True, keep_running=True)
    assert most_used_since(before) > LEAST_CPU_SECONDS
    await node.runtime.delete_checkpoint("cpu-state")
    await node.runtime.hibernate(slow.uid)
    before = used()
    await node.runtime.restore(slow.uid)
    # The cgroup of the restored sandbox is a new one.
    assert most_used_since(before) > LEAST_CPU_SECONDS


async def test_a_call_that_is_given_up_leaves_the_queue(node: TestNode, slow) -> None:
    await node.runtime.snapshot(slow.uid, "queued-state", memory=True, keep_running=True)
    creates = [
        asyncio.create_task(
            node.runtime.create(
                Blueprint(uid=f"given-up-{number}", agent=SLOW, checkpoint_id="queued-state")
            )
        )
        for number in range(6)
    ]

    async def waiting() -> int:
        return {one.kind: one.waiting for one in await node.runtime.heavy_work()}["fork"]

    try:
        await eventually(waiting, pause=0.01)
        for create in creates[1:]:
            create.cancel()

        async def nothing_waits() -> bool:
            return await waiting() == 0

        await eventually(nothing_waits)
        assert not creates[0].done(), "they left the queue in their turn, or the restore was fast"
        assert (await creates[0]).state is InstanceState.RUNNING
        assert await node.runtime.inspect("given-up-5") is None
    finally:
        for number in range(6):
            await node.runtime.destroy(f"given-up-{number}")
        await node.runtime.delete_checkpoint("queued-state")


_COUNT = """
import os, time
for number in range(10**9):
    with open("/tmp/count.new", "w") as file:
        file.write(str(number))
    os.rename("/tmp/count.new", "/tmp/count")
    time.sleep(0.01)
"""


async def _count(instance: Instance) -> int:
    return int((await run(instance, "cat /tmp/count")).out or 0)


async def _counts_on(instance: Instance) -> None:
    """Wait until the program has counted further: it needs CPU time that restores use, too."""
    count = await _count(instance)

    async def is_higher() -> bool:
        return await _count(instance) > count

    await eventually(is_higher, pause=0.02)


async def test_a_sandbox_does_not_run_while_its_hibernation_waits(node: TestNode, box, slow):
    patient = await box(agent=SLOW)
    await begin(patient, f"exec python3 -c '{_COUNT}'")
    await eventually(lambda: _count(patient), pause=0.1)
    async with _slow_restores(node, slow):
        assert (await node.runtime.hibernate(patient.uid)).state is InstanceState.FROZEN
        waiting = asyncio.create_task(node.runtime.hibernate(patient.uid))
        await asyncio.sleep(0.3)
        assert not waiting.done(), "the restores were not slow"

        # Thawed before its turn, it continues, and the attempt ends without effect.
        assert (await node.runtime.thaw(patient.uid)).state is InstanceState.RUNNING
        await _counts_on(patient)
        with pytest.raises(ConflictError, match="was thawed before it could be hibernated"):
            await waiting
        await _counts_on(patient)
    # In its turn it is stored, and the same processes continue.
    before = await _count(patient)
    assert (await node.runtime.hibernate(patient.uid)).state is InstanceState.HIBERNATED
    await node.runtime.restore(patient.uid)
    assert await _count(patient) >= before
    await _counts_on(patient)
