"""One team's slow restores and dumps: another team's sandbox wakes almost as fast as ever.

A restore takes long if the stored processes have very many memory mappings. `--security-full` is
the attack in full size, some minutes.
"""

import asyncio
import time

import pytest

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


async def test_slow_restores_do_not_delay_another_team(node: TestNode, box, slow) -> None:
    other = await box(agent=OTHER)
    await node.runtime.hibernate(other.uid)
    usual = await _wake_seconds(node, other.uid)
    await node.runtime.hibernate(other.uid)
    await node.runtime.snapshot(slow.uid, "slow-state", memory=True, keep_running=True)
    forks = [f"slow-{number}" for number in range(4)]
    creates = [
        asyncio.create_task(
            node.runtime.create(Blueprint(uid=uid, agent=SLOW, checkpoint_id="slow-state"))
        )
        for uid in forks
    ]
    try:

        async def some_wait() -> bool:
            report = {one.kind: one for one in await node.runtime.heavy_work()}
            return report["fork"].running > 0 and report["fork"].waiting > 0

        await eventually(some_wait)
        woken = await _wake_seconds(node, other.uid)
        assert woken < max(10 * usual, 0.6)
        assert not any(create.done() for create in creates), "the restores were not slow"
        for made in await asyncio.gather(*creates):
            assert made.state is InstanceState.RUNNING
    finally:
        await asyncio.gather(*creates, return_exceptions=True)
        for uid in forks:
            await node.runtime.destroy(uid)
        await node.runtime.delete_checkpoint("slow-state")


async def test_dump_and_restore_use_the_cpu_time_of_the_sandbox(node: TestNode, slow) -> None:
    cgroups = Cgroups((await node.facts())["node_id"])

    def used() -> float:
        return max(cgroups.cpu_seconds(name) for name in cgroups.names())

    before = used()
    await node.runtime.snapshot(slow.uid, "cpu-state", memory=True, keep_running=True)
    assert used() - before > LEAST_CPU_SECONDS
    await node.runtime.delete_checkpoint("cpu-state")
    await node.runtime.hibernate(slow.uid)
    await node.runtime.restore(slow.uid)
    # The cgroup of the restored sandbox is a new one.
    assert used() > LEAST_CPU_SECONDS


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

        await eventually(nothing_waits, seconds=0.5)
        assert (await creates[0]).state is InstanceState.RUNNING
        assert await node.runtime.inspect("given-up-5") is None
    finally:
        for number in range(6):
            await node.runtime.destroy(f"given-up-{number}")
        await node.runtime.delete_checkpoint("queued-state")
