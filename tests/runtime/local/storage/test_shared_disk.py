"""A disk that sandboxes share with the store: the reserve stays, whatever sandboxes write."""

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paddock.runtime.local.storage import Storage, open_storage
from paddock.runtime.local.storage.reserve import DiskReserve
from paddock.runtime.local.storage.shared_disk import fastest_writer, tight_limits
from paddock.runtime.port import Blueprint, Instance, InstanceState
from tests.runtime.local.inside import begin, run
from tests.runtime.local.nodes import TestNode, eventually

MIB = 1 << 20


@pytest.mark.parametrize(
    ("used", "limits", "writable", "expected"),
    [
        ({"a": 100_000}, {"a": 0}, 50_000, {"a": 150_000}),
        ({"a": 100_000, "b": 0}, {"a": 0, "b": 0}, 50_000, {"a": 125_000, "b": 25_000}),
        ({"a": 100_000}, {"a": 120_000}, 50_000, {"a": 120_000}),
        ({"a": 100_000, "b": 0}, {"a": 0, "b": 0}, 0, {"a": 100_000, "b": 4096}),
        ({}, {}, 50_000, {}),
    ],
)
def test_all_trees_together_may_write_what_is_left(used, limits, writable, expected):
    assert tight_limits(used, limits, writable) == expected


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ({"a": 10, "b": 10}, {"a": 20, "b": 30}, "b"),
        ({"a": 10, "b": 10}, {"a": 10, "b": 5}, None),
        ({"a": 10}, {"a": 10, "new": 500}, None),
        ({}, {}, None),
    ],
)
def test_the_tree_that_has_grown_most_is_the_fastest_writer(before, now, expected):
    assert fastest_writer(before, now) == expected


@contextmanager
def btrfs_disk(tmp_path: Path, size: int) -> Iterator[Path]:
    """Mount a new btrfs, as the disk of a machine."""
    image, disk = tmp_path / "disk.img", tmp_path / "disk"
    disk.mkdir()
    image.touch()
    os.truncate(image, size)
    subprocess.run(["mkfs.btrfs", "-q", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(disk)], check=True)
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.fixture
def on_btrfs(tmp_path: Path) -> Iterator[Storage]:
    """Storage of a state directory on btrfs, with a reserve of 200 MiB of 1 GiB."""
    with btrfs_disk(tmp_path, 1 << 30) as disk:
        storage = open_storage(
            disk / "storage", backend="btrfs", reserve=DiskReserve(disk, 200 * MIB)
        )
        yield storage
        storage.close()


def write(path: Path, size: int, *, is_synced: bool = True) -> bool:
    """Append to a file and perhaps wait for the disk; whether it fitted."""
    try:
        with path.open("ab", buffering=0) as file:
            file.write(os.urandom(size))
            if is_synced:
                os.fsync(file.fileno())
    except OSError as error:
        if error.errno not in (errno.EDQUOT, errno.ENOSPC):
            raise
        return False
    return True


def fill(ballast: Path, free_bytes: int) -> None:
    """Allocate a file of which so much of its disk stays free."""
    facts = os.statvfs(ballast.parent)
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, facts.f_bavail * facts.f_frsize - free_bytes)
    os.sync()


@pytest.mark.sandbox
@pytest.mark.parametrize("is_synced", [True, False])
def test_on_btrfs_sandboxes_can_write_until_half_of_the_reserve_is_left(
    on_btrfs: Storage, is_synced: bool
):
    disks = [on_btrfs.create(name) for name in ("one", "two")]
    fits = True
    while fits:
        results = [write(disk.upper / "file", 8 * MIB, is_synced=is_synced) for disk in disks]
        fits = any(results)
        assert on_btrfs.keep_reserve() is None
    os.sync()
    free = on_btrfs.reserve.status().free_bytes
    assert 80 * MIB < free < 140 * MIB

    # The store is not limited, and sandboxes can write again when there is space.
    assert write(on_btrfs.trees.parent / "store", 16 * MIB)
    (disks[0].upper / "file").unlink()
    os.sync()
    on_btrfs.keep_reserve()
    assert write(disks[1].upper / "file", 8 * MIB)


@pytest.mark.sandbox
def test_a_tree_has_its_own_limit_again_when_there_is_space(on_btrfs: Storage):
    disk = on_btrfs.create("one", limit_bytes=64 * MIB)
    ballast = on_btrfs.trees.parent / "ballast"
    fill(ballast, free_bytes=90 * MIB)
    on_btrfs.keep_reserve()
    assert not write(disk.upper / "file", 8 * MIB)
    ballast.unlink()
    os.sync()
    on_btrfs.keep_reserve()
    for _ in range(5):
        assert write(disk.upper / "file", 8 * MIB)
    assert not all(write(disk.upper / "file", 8 * MIB) for _ in range(5))


_WRITE = """
import os
with open("/home/user/file", "ab", buffering=0) as file:
    while True:
        file.write(os.urandom(1 << 20))
"""


@pytest.mark.sandbox
@pytest.mark.timeout(300)
async def test_on_plain_directories_the_sandbox_that_fills_the_disk_ends(tmp_path: Path):
    with btrfs_disk(tmp_path, 4 << 30) as disk:
        reserve = f"--disk-reserve-bytes={2500 * MIB}"
        # Sandboxes can be created, and there is less to write until half of the reserve is left.
        fill(disk / "ballast", free_bytes=2900 * MIB)
        node = TestNode("--storage", "plain", "--warm-count=0", reserve, state=str(disk / "n"))
        await node.start()
        try:
            neighbour, writer = await _make(node, "neighbour"), await _make(node, "writer")
            await run(neighbour, "echo kept > /home/user/file")
            await begin(writer, f"exec /usr/bin/python3 -c '{_WRITE}'")

            async def has_failed() -> bool:
                found = await node.runtime.inspect("writer")
                return found is not None and found.state is InstanceState.FAILED

            await eventually(has_failed, seconds=120)
            found = await node.runtime.inspect("writer")
            assert found is not None
            assert "only half of the reserve is left" in (found.reason or "")
            free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
            # It writes a little more until the node has seen it.
            assert free > 1000 * MIB
            assert (await run(neighbour, "cat /home/user/file")).out == "kept\n"
            assert "writer" in {one.uid for one in await node.runtime.instances()}
        finally:
            await node.stop()


async def _make(node: TestNode, uid: str) -> Instance:
    return await node.runtime.create(Blueprint(uid=uid, image="host"))
