"""The btrfs image: sparse, reusable, growing while in use, and safe on a full disk."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paddock.kit.errors import DiskFullError, InvalidError
from paddock.runtime.local.storage import btrfs_image_unavailable_reason, btrfs_ioctl, open_storage
from paddock.runtime.local.storage.btrfs_image import BtrfsImage
from paddock.runtime.local.storage.select_backend import IMAGE, MOUNT
from tests.disks import small_disk

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(120)]


@pytest.fixture(autouse=True)
def machine_can() -> None:
    if reason := btrfs_image_unavailable_reason():
        pytest.skip(f"this machine cannot create a btrfs image: {reason}")


@pytest.fixture
def image(tmp_path: Path) -> Iterator[BtrfsImage]:
    image = BtrfsImage(tmp_path / "image", tmp_path / "mount")
    image.open(512 << 20)
    yield image
    image.unmount()


def free_bytes(path: Path) -> int:
    facts = os.statvfs(path)
    return facts.f_bavail * facts.f_frsize


def test_the_image_is_sparse(image: BtrfsImage):
    assert image.status().size_bytes == 512 << 20
    assert image.status().allocated_bytes < 64 << 20


def test_opening_again_finds_it_mounted(image: BtrfsImage, tmp_path: Path):
    (image.mount_point / "file").write_text("kept")
    BtrfsImage(tmp_path / "image", tmp_path / "mount").open()
    mounts = Path("/proc/self/mountinfo").read_text()
    assert mounts.count(f" {image.mount_point} ") == 1
    assert (image.mount_point / "file").read_text() == "kept"


def test_the_image_grows_while_files_are_open(image: BtrfsImage):
    before = free_bytes(image.mount_point)
    with (image.mount_point / "file").open("w") as file:
        image.grow(1 << 30)
        file.write("still writable")
    assert free_bytes(image.mount_point) - before > 400 << 20
    image.grow(256 << 20)
    assert image.status().size_bytes == 1 << 30


def test_the_image_grows_when_nearly_full(image: BtrfsImage):
    with (image.mount_point / "file").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, int(free_bytes(image.mount_point) * 0.95))
    image.ensure_room()
    assert image.status().size_bytes > 512 << 20


def test_freed_space_is_returned_to_the_disk(image: BtrfsImage):
    with (image.mount_point / "file").open("wb") as file:
        file.write(os.urandom(64 << 20))
        os.fsync(file.fileno())
    full = image.status().allocated_bytes
    (image.mount_point / "file").unlink()
    btrfs_ioctl.sync_tree(image.mount_point)
    subprocess.run(["fstrim", image.mount_point], check=True)
    deadline = time.monotonic() + 60  # partly in the background
    while image.status().allocated_bytes >= full - (48 << 20):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_an_incomplete_image_is_created_again(tmp_path: Path):
    (tmp_path / "image.new").write_bytes(b"left by a crash")
    image = BtrfsImage(tmp_path / "image", tmp_path / "mount")
    image.open(512 << 20)
    image.unmount()
    assert not (tmp_path / "image.new").exists()


def test_mkfs_is_retried_when_a_loop_device_disappears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # given a mkfs that fails once because a loop device was just unmounted
    real = shutil.which("mkfs.btrfs")
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "mkfs.btrfs"
    program.write_text(
        f"#!/bin/sh\nif mkdir {tmp_path}/asked 2>/dev/null; then\n"
        "  echo 'ERROR: cannot check mount status of it: No such device or address' >&2\n"
        f'  exit 1\nfi\nexec {real} "$@"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    # when an image is created, then mkfs is run again
    image = BtrfsImage(tmp_path / "image", tmp_path / "mount")
    image.open(512 << 20)
    try:
        assert (tmp_path / "asked").is_dir()
        assert btrfs_ioctl.is_btrfs(image.mount_point)
    finally:
        image.unmount()


def test_new_disks_are_rejected_before_the_disk_is_full(tmp_path: Path):
    with small_disk(tmp_path / "disk", "400m") as disk:
        storage = open_storage(disk / "storage", backend="btrfs", image_bytes=1 << 30)
        try:
            storage.create("one")
            with (disk / "ballast").open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, 330 << 20)
            with pytest.raises(DiskFullError, match="are reserved") as refused:
                storage.create("two")
            assert refused.value.hint is not None
            assert storage.disks() == ("one",)
            (disk / "ballast").unlink()
            storage.create("two")
        finally:
            storage.close(detach=True)


def test_auto_prefers_btrfs_and_keeps_an_existing_backend(tmp_path: Path):
    made = open_storage(tmp_path / "one", image_bytes=512 << 20)
    assert made.backend_name == "btrfs"
    made.close(detach=True)
    assert (tmp_path / "one" / IMAGE).is_file()

    plain = open_storage(tmp_path / "two", backend="plain")
    plain.create("box")
    plain.close()
    again = open_storage(tmp_path / "two")
    assert (again.backend_name, again.disks()) == ("plain", ("box",))
    again.close()
    assert not os.path.ismount(tmp_path / "two" / MOUNT)


def test_a_state_directory_on_btrfs_is_used_as_it_is(image: BtrfsImage):
    storage = open_storage(image.mount_point / "state")
    assert storage.backend_name == "btrfs"
    assert not (image.mount_point / "state" / IMAGE).exists()
    disk = storage.create("one", limit_bytes=4 << 20)
    storage.snapshot("one", "cp")
    assert disk.path.stat().st_ino == 256
    storage.close(detach=True)


def test_plain_storage_reports_why_it_cannot_limit(tmp_path: Path):
    storage = open_storage(tmp_path / "plain", backend="plain")
    if not storage.capabilities.can_limit_disk:
        assert "project quotas" in storage.capabilities.reason
    storage.close()


def test_an_unknown_backend_is_rejected(tmp_path: Path):
    with pytest.raises(InvalidError, match="not a storage backend"):
        open_storage(tmp_path, backend="zfs")
