"""A node killed during a dump or restore damages neither the sandbox nor its stored memory."""

import asyncio
import functools
import os
import random
import signal
import sys
from pathlib import Path

import pytest

from paddock.runtime.local.checkpoint import is_complete
from paddock.runtime.local.kernel.pidfds import has_ended
from tests.runtime.local.checkpoint.lab import Guest, Lab, poll
from tests.runtime.local.checkpoint.test_sandboxes_come_back import COUNTER, counting, text

pytestmark = [pytest.mark.sandbox, pytest.mark.faults, pytest.mark.timeout(120)]

NODE = """
import sys
from pathlib import Path
from paddock.runtime.local.checkpoint import Checkpointer, Dump, find_criu
checkpointer = Checkpointer(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
checkpointer.dump(Dump(pid=int(sys.argv[2]), images=Path(sys.argv[3]), group=sys.argv[4],
                       leave_running=sys.argv[5] == "leave"))
print("done", flush=True)
sys.stdin.readline()
"""

RESTORING_NODE = """
import sys
from pathlib import Path
from paddock.runtime.local.checkpoint import Checkpointer, RestoreMounts, Restore
checkpointer = Checkpointer(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
checkpointer.restore(Restore(images=Path(sys.argv[2]), id_base=int(sys.argv[3]),
                             mount_root=lambda _: RestoreMounts(root=int(sys.argv[4])),
                             groups=sys.argv[5:]))
sys.stdin.readline()
"""


async def dump_and_kill(lab: Lab, guest: Guest, images: Path, how: str, after: float) -> None:
    """Dump a sandbox from another process, and kill that process some milliseconds later."""
    guest.detach()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", NODE, str(lab.checkpointer._criu.path), str(guest.pid), str(images),
        lab.groups.unified(lab.group_of(guest)), how,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"
    process.stdin.write(b"go\n")
    await asyncio.sleep(after)
    # Stopped first, so that all its children are found: CRIU outlives it and ends by itself.
    os.kill(process.pid, signal.SIGSTOP)
    await poll(lambda: is_stopped(process.pid))
    runs = [os.pidfd_open(pid) for pid in children(process.pid)]
    process.kill()
    await process.wait()
    for run in runs:
        await poll(lambda run=run: has_ended(run))
        os.close(run)


def is_stopped(pid: int) -> bool:
    """Whether every thread of a process has stopped or ended."""
    try:
        stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:  # one ended in between
        return False
    return all(stat.rpartition(") ")[2][0] in "TZX" for stat in stats)


def children(pid: int) -> list[int]:
    """Return the children of a stopped process."""
    found = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for text in found for child in text.split()]


async def test_a_sandbox_continues_when_its_node_is_killed_during_a_dump(lab: Lab):
    guest = await lab.start("one")
    await guest.spawn("python3", "-c", COUNTER)
    await counting(guest)
    images = lab.storage.checkpoint_memory("cp")
    moments = [random.uniform(0.0, 0.25) for _ in range(6)]
    for moment in moments:
        await dump_and_kill(lab, guest, images, "leave", moment)
        before, _ = await counting(guest)
        assert before > 0, moments
        assert not lab.groups.is_frozen(lab.group_of(guest)), moments
    await lab.dump(
        guest, images, leave_running=True, while_frozen=lambda: lab.storage.snapshot("one", "cp")
    )
    lab.storage.clone("cp", "two")
    await counting(await lab.restore("two", images))


async def test_a_sandbox_is_intact_when_its_node_is_killed_during_hibernation(lab: Lab):
    for number in range(4):
        uid = f"box-{number}"
        guest = await lab.start(uid)
        await guest.spawn("python3", "-c", COUNTER)
        await counting(guest)
        images = lab.storage.sandbox_memory(uid)
        moment = random.uniform(0.05, 0.3)
        await dump_and_kill(lab, guest, images, "end", moment)
        await poll(functools.partial(has_ended_or_continues, lab, guest, text(guest, "/tmp/count")))
        if lab.groups.is_populated(lab.group_of(guest)):
            # It was not stored in time, so it must continue.
            await counting(guest)
        else:
            assert is_complete(images), moment
            await counting(await lab.restore(uid, images))


def has_ended_or_continues(lab: Lab, guest: Guest, counted: str) -> bool:
    is_over = not lab.groups.is_populated(lab.group_of(guest))
    return is_over or text(guest, "/tmp/count") not in ("", counted)


async def test_nothing_is_left_when_a_node_is_killed_during_a_restore(lab: Lab):
    guest = await lab.start("one")
    await guest.spawn("python3", "-c", COUNTER)
    await counting(guest)
    images = lab.storage.sandbox_memory("one")
    await lab.dump(guest, images, leave_running=False)
    mounts = lab.mounts()
    for _ in range(4):
        slot = lab.slot()
        lab.groups.create(f"s{slot}")
        box = lab.storage.find("one")
        assert box is not None
        (root,) = await lab.launcher.mount_root(
            lab.checkpointer.id_namespace(lab.base(slot)), lab.root_of(slot, box.path)
        )
        groups = (lab.groups.unified(f"s{slot}"), *lab.groups.joins(f"s{slot}"))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", RESTORING_NODE, str(lab.checkpointer._criu.path), str(images),
            str(lab.base(slot)), str(root), *groups, pass_fds=[root],
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        os.close(root)
        assert process.stdin is not None
        assert process.stdout is not None
        assert await process.stdout.readline() == b"ready\n"
        process.stdin.write(b"go\n")
        await asyncio.sleep(random.uniform(0.0, 0.2))
        process.kill()
        await process.wait()
        # As the next node does with a group without a settled record.
        await poll(lambda s=slot: lab.groups.kill(f"s{s}") or lab.groups.remove(f"s{s}"))
    assert lab.mounts() == mounts
    await counting(await lab.restore("one", images))
