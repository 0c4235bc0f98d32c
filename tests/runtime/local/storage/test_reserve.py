"""The reserve of a disk: its size, what it refuses, and that full disks do not damage sandboxes."""

import errno
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from paddock.kit import metrics
from paddock.kit.errors import DiskFullError
from paddock.runtime.local.images.store import ImageStore
from paddock.runtime.local.storage import Storage, btrfs_image_unavailable_reason, open_storage
from paddock.runtime.local.storage.reserve import DiskReserve, default_reserve, export_metrics
from tests.disks import small_disk

GIB, MIB = 1 << 30, 1 << 20
sandbox = pytest.mark.sandbox


@pytest.mark.parametrize(
    ("total", "reserve"),
    [
        (1 * GIB, GIB // 5),
        (8 * GIB, int(1.6 * GIB)),
        (20 * GIB, 2 * GIB),
        (100 * GIB, 5 * GIB),
        (1000 * GIB, 8 * GIB),
    ],
)
def test_the_default_reserve_suits_small_and_large_disks(total: int, reserve: int):
    assert abs(default_reserve(total) - reserve) <= 1


def fill(path: Path, size: int) -> None:
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)


@sandbox
def test_the_error_names_the_disk_what_is_free_and_the_next_step(tmp_path: Path):
    with small_disk(tmp_path / "disk", "100m") as disk:
        reserve = DiskReserve(disk, 20 * MIB)
        reserve.ensure_room("import x", 80 * MIB)
        with pytest.raises(DiskFullError) as refused:
            reserve.ensure_room("import x", 81 * MIB)
        assert refused.value.message == (
            f"cannot import x: the disk of {disk} has 100 MiB free, of which 20 MiB are reserved, "
            "and this needs 81 MiB"
        )
        assert "disk_reserve_bytes" in str(refused.value.hint)


@sandbox
def test_reaching_and_leaving_the_reserve_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    with small_disk(tmp_path / "disk", "100m") as disk:
        reserve = DiskReserve(disk, 20 * MIB)
        for _ in range(3):
            assert not reserve.report().is_low
        fill(disk / "ballast", 90 * MIB)
        for _ in range(3):
            assert reserve.report().is_low
        os.truncate(disk / "ballast", 79 * MIB)  # hardly more than the reserve is free
        reserve.report()
        (disk / "ballast").unlink()
        for _ in range(3):
            reserve.report()
    assert [record.message for record in caplog.records] == [
        "disk reserve is reached: new work is refused",
        "disk has space again",
    ]


@sandbox
@pytest.mark.parametrize("backend", ["btrfs", "plain"])
def test_below_the_reserve_new_disks_and_checkpoints_are_refused_and_old_ones_work(
    tmp_path: Path, backend: str
):
    if backend == "btrfs" and (reason := btrfs_image_unavailable_reason()):
        pytest.skip(reason)
    with small_disk(tmp_path / "disk", "600m") as disk:
        reserve = DiskReserve(disk, 100 * MIB)
        storage = open_storage(
            disk / "storage", backend=backend, image_bytes=400 * MIB, reserve=reserve
        )
        try:
            there = storage.create("there")
            (there.upper / "file").write_bytes(b"x" * MIB)
            storage.snapshot("there", "kept")
            free = reserve.status().free_bytes
            fill(disk / "ballast", free - 60 * MIB)
            with pytest.raises(DiskFullError, match="create the disk of sandbox new"):
                storage.create("new")
            with pytest.raises(DiskFullError, match="from a checkpoint"):
                storage.clone("kept", "other")
            with pytest.raises(DiskFullError, match="store the files of sandbox there"):
                storage.snapshot("there", "second")
            assert storage.disks() == ("there",)
            assert storage.checkpoints() == ("kept",)
            (there.upper / "file").write_bytes(b"y" * MIB)
            storage.delete_checkpoint("kept")
            (disk / "ballast").unlink()
            storage.create("new")
        finally:
            storage.close(detach=True)


@pytest.fixture
def overcommitted(tmp_path: Path) -> Iterator[tuple[Storage, Path]]:
    """A btrfs image that may become larger than its disk."""
    if reason := btrfs_image_unavailable_reason():
        pytest.skip(reason)
    with small_disk(tmp_path / "disk", "700m") as disk:
        storage = open_storage(
            disk / "storage",
            backend="btrfs",
            image_bytes=2 * GIB,
            reserve=DiskReserve(disk, 200 * MIB),
        )
        try:
            yield storage, disk
        finally:
            storage.close(detach=True)


def write_until_refused(path: Path) -> int:
    """Write data that cannot be shared until the disk is full; return the error number."""
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(os.urandom(MIB))
                os.fsync(file.fileno())
        except OSError as error:
            return error.errno or 0


@sandbox
@pytest.mark.timeout(120)
def test_sandboxes_that_fill_the_disk_get_enospc_and_leave_room_for_the_store(
    overcommitted: tuple[Storage, Path],
):
    storage, disk = overcommitted
    box = storage.create("box")
    (box.upper / "before").write_text("kept")
    # Without the balloon the image accepts more than the disk has, and then fails with EIO.
    assert write_until_refused(box.upper / "large") == errno.ENOSPC
    assert DiskReserve(disk).status().free_bytes >= 64 * MIB
    (disk / "store.db").write_bytes(b"x" * MIB)
    (box.upper / "large").unlink()
    (box.upper / "after").write_text("writable")
    assert (box.upper / "before").read_text() == "kept"


@sandbox
@pytest.mark.timeout(120)
def test_sandboxes_can_write_less_while_others_use_the_disk(
    overcommitted: tuple[Storage, Path],
):
    storage, disk = overcommitted
    box = storage.create("box")
    free = os.statvfs(box.path).f_bavail * os.statvfs(box.path).f_frsize
    fill(disk / "images", 300 * MIB)
    for _ in range(2):  # the first may have caused a chunk of metadata, the second corrects that
        storage.keep_reserve()
    later = os.statvfs(box.path).f_bavail * os.statvfs(box.path).f_frsize
    assert 250 * MIB <= free - later <= 350 * MIB
    assert write_until_refused(box.upper / "large") == errno.ENOSPC
    assert DiskReserve(disk).status().free_bytes >= 64 * MIB
    (disk / "images").unlink()
    storage.keep_reserve()
    assert write_until_refused(box.upper / "more") == errno.ENOSPC
    assert (box.upper / "more").stat().st_size > 200 * MIB


@sandbox
def test_an_image_that_does_not_fit_beside_the_reserve_leaves_nothing(tmp_path: Path):
    source = tmp_path / "root"
    (source / "bin").mkdir(parents=True)
    (source / "bin" / "large").write_bytes(os.urandom(30 * MIB))
    with small_disk(tmp_path / "disk", "100m") as disk:
        store = ImageStore(disk / "images", reserve=DiskReserve(disk, 75 * MIB))
        with pytest.raises(DiskFullError, match="and this needs 30 MiB"):
            store.add(source, "large")
        assert list((disk / "images" / "layers").iterdir()) == []
        ImageStore(disk / "images", reserve=DiskReserve(disk, 50 * MIB)).add(source, "large")


def test_free_and_reserved_bytes_are_exported(tmp_path: Path):
    export_metrics(DiskReserve(tmp_path, 123))
    lines = metrics.exposition().decode().splitlines()
    assert "paddock_disk_reserve_bytes 123.0" in lines
    assert any(line.startswith("paddock_disk_free_bytes ") for line in lines)
