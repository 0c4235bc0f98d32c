"""The storage contract, on btrfs and on plain directories."""

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from paddock.kit.errors import InvalidError, NotFoundError
from paddock.runtime.local.storage import Storage, btrfs_image_unavailable_reason, open_storage

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(120)]


def opened(root: Path, backend: str) -> Storage:
    return open_storage(root, backend=backend, image_bytes=1 << 30)


@pytest.fixture(params=["btrfs", "plain"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "btrfs" and (reason := btrfs_image_unavailable_reason()):
        pytest.skip(f"this machine cannot create a btrfs image: {reason}")
    return request.param


@pytest.fixture
def storage(tmp_path: Path, backend: str) -> Iterator[Storage]:
    storage = opened(tmp_path / "storage", backend)
    yield storage
    storage.close(detach=True)


def test_a_new_box_is_empty_and_owned_by_root(storage: Storage):
    disk = storage.create("one")
    assert list(disk.upper.iterdir()) == []
    assert list(disk.work.iterdir()) == []
    assert (disk.upper.stat().st_uid, disk.upper.stat().st_mode & 0o777) == (0, 0o755)


def test_creating_a_box_is_idempotent_and_keeps_files(storage: Storage):
    first = storage.create("one")
    (first.upper / "file").write_text("kept")
    again = storage.create("one")
    assert again == first
    assert (again.upper / "file").read_text() == "kept"


def test_a_clone_has_the_files_at_the_time_of_the_snapshot(storage: Storage):
    disk = storage.create("one")
    (disk.upper / "file").write_text("before")
    os.mknod(disk.upper / "gone", 0o20000, os.makedev(0, 0))  # an overlay whiteout
    os.setxattr(disk.upper, "trusted.overlay.opaque", b"y")
    os.chown(disk.upper / "file", 1000, 1000)
    storage.snapshot("one", "cp")
    (disk.upper / "file").write_text("after")

    clone = storage.clone("cp", "two")

    assert (clone.upper / "file").read_text() == "before"
    assert (clone.upper / "file").stat().st_uid == 1000
    assert (clone.upper / "gone").is_char_device()
    assert os.getxattr(clone.upper, "trusted.overlay.opaque") == b"y"
    assert (disk.upper / "file").read_text() == "after"


def test_clones_of_one_checkpoint_do_not_see_each_other(storage: Storage):
    storage.create("one")
    storage.snapshot("one", "cp")
    second, third = storage.clone("cp", "two"), storage.clone("cp", "three")
    (second.upper / "mine").write_text("2")
    assert not (third.upper / "mine").exists()


def test_a_clone_outlives_its_checkpoint_and_its_source(storage: Storage):
    disk = storage.create("one")
    (disk.upper / "file").write_text("kept")
    storage.snapshot("one", "cp")
    clone = storage.clone("cp", "two")
    storage.delete("one")
    storage.delete_checkpoint("cp")
    storage.wait_deleted()
    assert (clone.upper / "file").read_text() == "kept"
    assert (storage.disks(), storage.checkpoints()) == (("two",), ())


def test_a_second_snapshot_with_the_same_id_keeps_the_first(storage: Storage):
    disk = storage.create("one")
    (disk.upper / "file").write_text("first")
    storage.snapshot("one", "cp")
    (disk.upper / "file").write_text("second")
    storage.snapshot("one", "cp")
    assert (storage.clone("cp", "two").upper / "file").read_text() == "first"


def test_deleting_unknown_names_is_ignored(storage: Storage):
    storage.delete("nobody")
    storage.delete_checkpoint("nothing")
    assert storage.disks() == ()


def test_unknown_names_are_not_found(storage: Storage):
    with pytest.raises(NotFoundError):
        storage.clone("nothing", "two")
    with pytest.raises(NotFoundError):
        storage.snapshot("nobody", "cp")
    with pytest.raises(NotFoundError):
        storage.usage_bytes("nobody")


@pytest.mark.parametrize("name", ["", "..", ".hidden", "a/b", "a\0b", "x" * 300, "-"])
def test_names_that_could_escape_their_directory_are_rejected(storage: Storage, name: str):
    with pytest.raises(InvalidError):
        storage.create(name)
    with pytest.raises(InvalidError):
        storage.delete_checkpoint(name)


def test_deleting_a_box_deletes_its_memory(storage: Storage):
    storage.create("one")
    storage.sandbox_memory("one").mkdir()
    (storage.sandbox_memory("one") / "pages-1.img").write_bytes(b"x" * 4096)
    storage.delete("one")
    storage.wait_deleted()
    assert not storage.sandbox_memory("one").exists()
    assert storage.find("one") is None


def test_a_reopened_storage_finds_everything(tmp_path: Path, backend: str):
    storage = opened(tmp_path / "storage", backend)
    disk = storage.create("one", limit_bytes=64 << 20)
    (disk.upper / "file").write_text("kept")
    storage.snapshot("one", "cp")
    storage.close(detach=True)  # as after a reboot: nothing is mounted

    storage = opened(tmp_path / "storage", "auto" if backend == "btrfs" else backend)
    try:
        assert storage.sweep() == ()
        found = storage.find("one")
        assert found is not None
        assert found.limit_bytes == 64 << 20
        assert (found.upper / "file").read_text() == "kept"
        assert storage.checkpoints() == ("cp",)
        assert storage.backend_name == backend
    finally:
        storage.close(detach=True)


def test_incomplete_trees_are_removed_after_a_crash(tmp_path: Path, backend: str):
    storage = opened(tmp_path / "storage", backend)
    whole, half = storage.create("whole"), storage.create("half")
    storage.create("other")
    storage.snapshot("other", "half-cp")
    (tmp_path / "storage" / "records" / "boxes" / "half.json").write_text('{"limit_by')
    (tmp_path / "storage" / "records" / "checkpoints" / "half-cp.json").unlink()
    shutil.rmtree(storage.sandbox_memory("stray"), ignore_errors=True)
    storage.sandbox_memory("stray").mkdir()
    storage.close()

    storage = opened(tmp_path / "storage", backend)
    try:
        swept = storage.sweep()
        storage.wait_deleted()
        assert whole.path.is_dir()
        assert not storage.sandbox_memory("stray").exists()
        assert set(swept) == {"checkpoints/half-cp", "memory/boxes/stray"}
        # An unreadable record means the disk is incomplete: it is created again, empty.
        (half.upper / "rest").write_text("of the first try")
        assert list(storage.create("half").upper.iterdir()) == []
    finally:
        storage.close(detach=True)


def test_usage_grows_with_writes_and_clones_inherit_it(storage: Storage):
    disk = storage.create("one")
    (disk.upper / "file").write_bytes(os.urandom(8 << 20))
    storage.flush("one")
    assert storage.usage_bytes("one") >= 8 << 20
    storage.snapshot("one", "cp")
    assert storage.checkpoint_bytes("cp") >= (8 << 20 if storage.backend_name == "btrfs" else 0)
    storage.clone("cp", "two")
    assert storage.usage_bytes("two") >= 8 << 20


class TestLimitsOnBtrfs:
    @pytest.fixture
    def storage(self, tmp_path: Path) -> Iterator[Storage]:
        if reason := btrfs_image_unavailable_reason():
            pytest.skip(f"this machine cannot create a btrfs image: {reason}")
        storage = opened(tmp_path / "storage", "btrfs")
        assert storage.capabilities.can_limit_disk
        yield storage
        storage.close(detach=True)

    def test_writes_beyond_the_limit_fail_without_affecting_others(self, storage: Storage):
        disk = storage.create("one", limit_bytes=16 << 20)
        neighbour = storage.create("two", limit_bytes=16 << 20)
        written, code = fill(disk.upper / "file", 32 << 20)
        assert code == errno.EDQUOT
        assert 8 << 20 <= written <= 16 << 20
        (neighbour.upper / "file").write_bytes(b"x" * (4 << 20))

    def test_deleted_files_free_the_limit(self, storage: Storage):
        disk = storage.create("one", limit_bytes=16 << 20)
        fill(disk.upper / "file", 32 << 20)
        (disk.upper / "file").unlink()
        storage.flush("one")
        assert fill(disk.upper / "again", 8 << 20) == (8 << 20, 0)

    def test_empty_files_count_towards_the_limit(self, storage: Storage):
        disk = storage.create("one", limit_bytes=2 << 20)
        made, code = make_empty_files(disk.upper, 50_000)
        assert code == errno.EDQUOT
        assert made < 10_000

    def test_data_shared_with_the_checkpoint_counts_towards_the_limit(self, storage: Storage):
        disk = storage.create("one", limit_bytes=32 << 20)
        fill(disk.upper / "file", 12 << 20)
        storage.flush("one")
        storage.snapshot("one", "cp")
        clone = storage.clone("cp", "two", limit_bytes=24 << 20)
        written, code = fill(clone.upper / "more", 24 << 20)
        assert code == errno.EDQUOT
        assert written <= 12 << 20

    def test_a_raised_limit_takes_effect_at_once(self, storage: Storage):
        disk = storage.create("one", limit_bytes=8 << 20)
        fill(disk.upper / "file", 16 << 20)
        storage.limit("one", 64 << 20)
        assert fill(disk.upper / "more", 16 << 20) == (16 << 20, 0)

    def test_quota_groups_of_deleted_disks_are_removed(self, storage: Storage):
        for number in range(5):
            storage.create(f"box-{number}")
        keep = storage.create("keep")
        for number in range(5):
            storage.delete(f"box-{number}")
        storage.wait_deleted()
        storage.flush("keep")
        storage.sweep()
        assert keep.path.is_dir()
        assert storage.disks() == ("keep",)


def fill(path: Path, size: int) -> tuple[int, int]:
    """Write until done or failed; return the bytes on disk and the errno."""
    written = 0
    with path.open("wb", buffering=0) as file:
        try:
            while written < size:
                file.write(os.urandom(1 << 20))
                os.fsync(file.fileno())
                written += 1 << 20
        except OSError as error:
            return written, error.errno or 0
    return written, 0


def make_empty_files(directory: Path, count: int) -> tuple[int, int]:
    """Create files until done or failed; return their number and the errno."""
    for number in range(count):
        try:
            os.close(os.open(directory / f"{number:0200}", os.O_CREAT | os.O_WRONLY))
        except OSError as error:
            return number, error.errno or 0
    return count, 0
