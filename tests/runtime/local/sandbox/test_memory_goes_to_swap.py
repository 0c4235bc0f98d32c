"""Memory of a frozen sandbox is swapped out if there is swap, and back in after a thaw."""

import asyncio
import contextlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from paddock.runtime.port import Blueprint, Instance, Limits
from tests.runtime.local.inside import begin, run
from tests.runtime.local.nodes import eventually

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(120)]

SIZE = 16_000_000
HOLD = f"""
import hashlib, os, sys, time
memory = os.urandom({SIZE})
print(hashlib.sha256(memory).hexdigest(), file=open("/tmp/before", "w"), flush=True)
while not os.path.exists("/tmp/wanted"):
    time.sleep(0.01)
print(hashlib.sha256(memory).hexdigest(), file=open("/tmp/after", "w"), flush=True)
time.sleep(600)
"""


@pytest.fixture
def swap(tmp_path: Path):
    """Enable a swap file for one test."""
    place = tmp_path / "swap"
    place.touch(mode=0o600)
    os.posix_fallocate((fd := os.open(place, os.O_RDWR)), 0, 128 << 20)
    os.close(fd)
    for command in ("mkswap", "swapon"):
        tool = shutil.which(command, path="/usr/sbin:/sbin")
        assert tool is not None, f"{command} is missing; it comes with util-linux"
        done = subprocess.run([tool, place], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"this machine takes no swap file: {done.stderr.strip()}")
    yield
    subprocess.run(["/usr/sbin/swapoff", place], check=True)


@pytest.fixture
async def sandbox(node):
    instance = await node.runtime.create(Blueprint(uid=f"m{os.urandom(4).hex()}", image="host"))
    yield instance
    await node.runtime.destroy(instance.uid)


async def holder(instance: Instance) -> int:
    """Start a process that holds memory; return its pid on the host."""
    marker = f"holder-{instance.uid}"
    await begin(instance, f"exec python3 -c '{HOLD}' {marker}")
    while not (await run(instance, "cat /tmp/before 2>/dev/null")).out:
        await asyncio.sleep(0.05)
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # other processes start and exit
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if words[0].endswith(b"python3") and marker.encode() in words:
                return int(entry.name)
    raise AssertionError("the process that holds memory was not found")


def kilobytes(pid: int, field: str) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition(f"{field}:")[2].split()[0])


@pytest.mark.usefixtures("swap")
async def test_memory_of_a_frozen_sandbox_is_swapped_out_and_back_unchanged(node, sandbox):
    pid = await holder(sandbox)
    assert kilobytes(pid, "VmRSS") > SIZE // 1024

    async def goes_out_when_frozen() -> bool:
        await node.runtime.freeze(sandbox.uid)
        try:
            await eventually(lambda: kilobytes(pid, "VmSwap") > SIZE // 1024 * 0.9, seconds=10)
        except AssertionError:
            # Other processes of the machine may fill the swap for a moment.
            await node.runtime.thaw(sandbox.uid)
            return False
        return True

    await eventually(goes_out_when_frozen, seconds=50)
    await node.runtime.thaw(sandbox.uid)
    await run(sandbox, "touch /tmp/wanted; while [ ! -s /tmp/after ]; do sleep 0.02; done")
    assert (await run(sandbox, "cmp /tmp/before /tmp/after")).status == 0


@pytest.mark.usefixtures("swap")
async def test_swap_of_a_sandbox_is_limited_by_its_memory_limit(node):
    limits = Limits(memory_bytes=24 << 20)
    uid = f"m{os.urandom(4).hex()}"
    sandbox = await node.runtime.create(Blueprint(uid=uid, image="host", limits=limits))
    try:
        hog = "python3 -c 'print(len(bytes([1]) * (96 << 20)))'"
        assert (await run(sandbox, hog)).status != 0
    finally:
        await node.runtime.destroy(uid)
