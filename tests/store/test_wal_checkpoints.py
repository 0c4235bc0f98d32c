"""The store's log where there is little room: it is folded before it takes the database's."""

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
"""Changes that the history keeps, where it is not what a test is about."""


@pytest.fixture
def disk() -> Iterator[Path]:
    with (
        tempfile.TemporaryDirectory(prefix="pdlog") as directory,
        small_disk(Path(directory), "16m") as place,
    ):
        yield place


def row(version: int, *, name: str = "one", size: int = 8000) -> Row:
    return ("Thing", "x", name, version, str(version).encode().ljust(size))


def log_of(path: Path) -> int:
    return path.with_name(f"{path.name}-wal").stat().st_size


def fill(disk: Path, *, but: int) -> Path:
    ballast = disk / "ballast"
    free = os.statvfs(disk)
    ballast.write_bytes(bytes(free.f_bavail * free.f_frsize - but))
    return ballast


def until_full(database: Database, *, folds: bool) -> int:
    """Store new objects until they are refused; says how many there are."""
    stored = 0
    with contextlib.suppress(UnavailableError):
        while True:
            database.write([row(stored + 1, name=f"n{stored}")])
            stored += 1
            if folds:
                database.checkpoint(is_idle=False)
    return stored


def test_one_who_is_killed_again_and_again_does_not_leave_an_endless_log(tmp_path: Path):
    version, home = 0, tmp_path / "0"
    home.mkdir()
    for life in range(1, 25):
        database = Database(home / "store.db", history=FEW)
        for _ in range(60):
            version += 1
            database.write([row(version)])
            database.checkpoint(is_idle=True)
        # What kill -9 leaves: the files as they are, without the folding of a close.
        after = tmp_path / str(life)
        shutil.copytree(home, after)
        database.close()
        home = after
        assert log_of(home / "store.db") < 2 * IDLE_CHECKPOINT_BYTES

    database = Database(home / "store.db", history=FEW)
    assert database.version() == version
    database.close()


def test_a_directory_that_is_taken_away_does_not_end_the_thread_that_folds(tmp_path: Path):
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
    def test_a_busy_log_leaves_the_database_room_to_grow(self, disk: Path):
        database = Database(disk / "store.db", history=FEW)
        stored = until_full(database, folds=True)
        assert stored * 8000 > 8 * MIB, "most of the disk holds objects, not the log"
        database.close()

    def test_a_write_that_finds_the_disk_full_takes_the_place_of_what_can_be_folded(
        self, disk: Path
    ):
        database = Database(disk / "store.db", history=FEW)
        for version in range(1, 200):
            database.write([row(version)])
        database.close()
        database = Database(disk / "store.db", history=FEW)
        fill(disk, but=MIB)
        # Nobody folds on the way: it is the writes themselves that have to.
        for version in range(200, 2000):
            database.write([row(version)])
        database.close()

        again = Database(disk / "store.db", history=FEW)
        assert [body for _, body in again.objects()] == [row(1999)[4]]
        again.close()

    def test_one_who_cannot_fold_tries_again_only_when_there_is_more_room(
        self, disk: Path, caplog: pytest.LogCaptureFixture
    ):
        database = Database(disk / "store.db", history=FEW)
        ballast = fill(disk, but=MIB)
        stored = until_full(database, folds=False)
        for _ in range(20):
            with pytest.raises(UnavailableError, match="full"):
                database.write([row(stored + 1, name=f"n{stored}")])
        assert caplog.text.count("WAL checkpoint failed") == 1

        ballast.unlink()
        database.write([row(stored + 1, name=f"n{stored}")])
        assert len(list(database.objects())) == stored + 1
        database.close()

    def test_one_who_could_not_fold_once_folds_again_on_the_next_full_disk(self, disk: Path):
        database = Database(disk / "store.db", history=FEW)
        ballast = fill(disk, but=MIB)
        version = until_full(database, folds=False)
        ballast.unlink()
        for _ in range(400):
            version += 1
            database.write([row(version)])
            database.checkpoint(is_idle=True)

        fill(disk, but=0)
        for _ in range(1200):
            version += 1
            database.write([row(version)])
        database.close()
