"""A nearly full disk under a real node: new work is refused, sandboxes keep running."""

import os
from pathlib import Path

import pytest

from paddock.kit.errors import DiskFullError
from paddock.runtime.port import Blueprint, InstanceState
from tests.disks import small_disk
from tests.runtime.local.inside import run
from tests.runtime.local.nodes import TestNode

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(180)]

MIB = 1 << 20


def leave_free(disk: Path, size: int) -> None:
    facts = os.statvfs(disk)
    with (disk / "ballast").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, facts.f_bavail * facts.f_frsize - size)


async def test_a_nearly_full_disk_refuses_new_work_and_keeps_sandboxes_running(tmp_path: Path):
    with small_disk(tmp_path / "disk", "800m") as disk:
        reserve = f"--disk-reserve-bytes={100 * MIB}"
        node = TestNode("--storage", "btrfs", "--warm-count=0", reserve, state=str(disk / "n"))
        await node.start()
        try:
            if not (await node.runtime.capabilities()).can_checkpoint:
                pytest.skip("this machine cannot store memory")
            instance = await node.runtime.create(Blueprint(uid="one", image="host"))
            await node.runtime.start("one")
            leave_free(disk, 90 * MIB)
            with pytest.raises(DiskFullError, match="hibernate sandbox one: the disk of"):
                await node.runtime.hibernate("one")
            for memory in (True, False):
                with pytest.raises(DiskFullError, match=r"sandbox one: the disk of .* reserved"):
                    await node.runtime.snapshot("one", "cp", memory=memory, keep_running=True)
            with pytest.raises(DiskFullError, match="create the disk of sandbox two"):
                await node.runtime.create(Blueprint(uid="two", image="host"))
            assert await node.runtime.checkpoints() == ()
            assert await node.runtime.inspect("two") is None
            assert (await run(instance, "echo x > /tmp/f && cat /tmp/f")).out == "x\n"
            # A pause falls back to freezing, which needs no space.
            assert (await node.runtime.freeze("one")).state is InstanceState.FROZEN
            await node.runtime.thaw("one")
            (disk / "ballast").unlink()
            hibernated = await node.runtime.hibernate("one")
            assert hibernated.stored_bytes > 0
            assert (await node.runtime.restore("one")).stored_bytes == 0
        finally:
            await node.stop()
