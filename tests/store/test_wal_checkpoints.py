"""WAL checkpoints on small and full disks."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from paddock.kit.errors import UnavailableError
from paddock.store.sqlite.database import IDLE_CHECKPOINT_BYTES, Database, Row
from tests.disks import small_disk

MIB = 1024 * 1024
FEW = 16
"""Length of the history in tests that are not about it."""


@pytest.fixture
def disk() -> Iterator[Path]:
    with (
        tempfile.TemporaryDirectory(prefix="pdlog") as directory,
        small_disk(Path(directory), "16m") as place,
    ):
        yield place


def row(version: int, *, name: str = "one", size: int = 8000) -> Row:
    return ("Thing", "x", name, version, str(version).encode().ljust(size))


def wal_size(path: Path) -> int:
    return path.with_name(f"{path.name}-wal").stat().st_size


def fill(disk: Path, *, free: int) -> Path:
    ballast = disk / "ballast"
    disk_stats = os.statvfs(disk)
    ballast.write_bytes(bytes(disk_stats.f_bavail * disk_stats.f_frsize - free))
    return ballast


def until_full(database: Database, *, checkpoints: bool) -> int:
    """Store new objects until a write fails; returns how many were stored."""
    stored = 0
    with contextlib.suppress(UnavailableError):
        while True:
            database.write([row(stored + 1, name=f"n{stored}")])
            stored += 1
            if checkpoints:
                database.checkpoint(is_idle=False)
    return stored


def test_repeated_kills_do_not_leave_an_unbounded_wal(tmp_path: Path):
    version, home = 0, tmp_path / "0"
    home.mkdir()
    for life in range(1, 25):
        database = Database(home / "store.db", history=FEW)
        for _ in range(60):
            version += 1
            database.write([row(version)])
            database.checkpoint(is_idle=True)
        # Copy the files as SIGKILL leaves them, without the checkpoint of a close.
        after = tmp_path / str(life)
        shutil.copytree(home, after)
        database.close()
        home = after
        assert wal_size(home / "store.db") < 2 * IDLE_CHECKPOINT_BYTES

    database = Database(home / "store.db", history=FEW)
    assert database.version() == version
    database.close()


def test_a_removed_directory_does_not_end_the_checkpoint_thread(tmp_path: Path):
    home = tmp_path / "home"
    home.mkdir()
    database = Database(home / "store.db", history=FEW)
    for version in range(1, 100):
        database.write([row(version)])
    shutil.rmtree(home)
    database.checkpoint(is_idle=True)
    with contextlib.suppress(UnavailableError):
        database.close()


@pytest.mark.faults
@pytest.mark.sandbox
class TestOnASmallDisk:
    def test_the_wal_leaves_space_for_the_database(self, disk: Path):
        database = Database(disk / "store.db", history=FEW)
        stored = until_full(database, checkpoints=True)
        assert stored * 8000 > 8 * MIB, "most of the disk holds objects, not the WAL"
        database.close()

    def test_a_write_on_a_full_disk_reuses_the_space_of_the_wal(self, disk: Path):
        database = Database(disk / "store.db", history=FEW)
        for version in range(1, 200):
            database.write([row(version)])
        database.close()
        database = Database(disk / "store.db", history=FEW)
        fill(disk, free=MIB)
        # No explicit checkpoints: the writes must run them.
        for version in range(200, 2000):
            database.write([row(version)])
        database.close()

        again = Database(disk / "store.db", history=FEW)
        assert [body for _, body in again.objects()] == [row(1999)[4]]
        again.close()

    def test_a_failed_checkpoint_is_retried_only_with_more_free_space(
        self, disk: Path, caplog: pytest.LogCaptureFixture
    ):
        database = Database(disk / "store.db", history=FEW)
        ballast = fill(disk, free=MIB)
        stored = until_full(database, checkpoints=False)
        for _ in range(20):
            with pytest.raises(UnavailableError, match="full"):
                database.write([row(stored + 1, name=f"n{stored}")])
        assert caplog.text.count("WAL checkpoint failed") == 1

        ballast.unlink()
        database.write([row(stored + 1, name=f"n{stored}")])
        assert len(list(database.objects())) == stored + 1
        database.close()

    def test_after_a_failed_checkpoint_the_next_full_disk_is_handled(self, disk: Path):
        database = Database(disk / "store.db", history=FEW)
        ballast = fill(disk, free=MIB)
        version = until_full(database, checkpoints=False)
        ballast.unlink()
        for _ in range(400):
            version += 1
            database.write([row(version)])
            database.checkpoint(is_idle=True)

        fill(disk, free=0)
        for _ in range(1200):
            version += 1
            database.write([row(version)])
        database.close()
