"""The file: reading it at start-up, and writing batches that are durable when `write` returns.

Synchronous, and used by one thread at a time. Which batch follows which, and what becomes visible
when, is in `journal`.
"""

import logging
import os
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from paddock.kit.errors import UnavailableError
from paddock.kit.logs import fields
from paddock.store.sqlite.schema import migrate
from paddock.store.table import history_within

log = logging.getLogger(__name__)

COMPACT_EVERY = 512
"""Versions by which the history may be longer than asked for; they go in one statement."""
CHECKPOINT_BYTES = 48 * 1024 * 1024
"""How much log is written before it is folded into the database in any case …"""
IDLE_CHECKPOINT_BYTES = 4 * 1024 * 1024
"""… how much when there is nothing else to do …"""
TIGHT_CHECKPOINT_BYTES = 1024 * 1024
"""… and how much at least, however little room the disk has."""
_PAGE_BYTES = 4096
_PAGES_PER_ROW = 2
_COLUMNS = 5
_ROWS_PER_STATEMENT = 32_000 // _COLUMNS
_TAIL = (
    " ON CONFLICT (kind, namespace, name)"
    " DO UPDATE SET version = excluded.version, body = excluded.body"
)

Row = tuple[str, str, str, int, bytes | None]
"""Kind, namespace, name, version, body; no body: the object is removed."""


class HistoryEntry(NamedTuple):
    """One entry of the history."""

    version: int
    kind: str
    namespace: str
    name: str
    before: bytes | None


class Database:
    """One open file."""

    def __init__(self, path: Path, *, history: int) -> None:
        self._path = path
        self._history = history
        self._row_bytes = 0
        self._room_when_stuck = -1
        try:
            self._connection = self._open()
        except sqlite3.Error as error:
            raise UnavailableError(
                f"the store {path} cannot be opened: {error}",
                hint="check the file and its directory, or restore a copy",
            ) from error
        # Those who were killed before may have left a long log, each a little of it.
        self._unfolded_bytes = _size(path.with_name(f"{path.name}-wal"))
        oldest = self._connection.execute("SELECT min(version) FROM history").fetchone()[0]
        self.compacted = 0 if oldest is None else int(oldest) - 1
        """The newest version whose change is no longer kept."""

    def _open(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self._path, isolation_level=None, check_same_thread=False, cached_statements=256
        )
        try:
            connection.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
            # No shared memory file: nobody else may open this database anyway, and one that is
            # mapped on a full disk would end the process.
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA wal_autocheckpoint = 0")
            connection.execute("PRAGMA temp_store = MEMORY")
            connection.execute("PRAGMA cache_size = -16384")
            migrate(connection)
        except BaseException:
            connection.close()
            raise
        _sync_directory(self._path.parent)
        return connection

    # ---- reading -------------------------------------------------------------------------

    def version(self) -> int:
        """Return the newest version ever stored; 0 in a new file."""
        newest = 0
        for table in ("history", "objects"):
            row = self._connection.execute(f"SELECT max(version) FROM {table}").fetchone()  # noqa: S608 - fixed names
            newest = max(newest, row[0] or 0)
        return newest

    def objects(self) -> Iterator[tuple[str, bytes]]:
        """Return kind and body of every object."""
        return self._connection.execute("SELECT kind, body FROM objects")

    def changes(self) -> Iterator[HistoryEntry]:
        """Return the history, newest first."""
        query = "SELECT version, kind, namespace, name, before FROM history ORDER BY version DESC"
        return (HistoryEntry(*row) for row in self._connection.execute(query))

    # ---- writing -------------------------------------------------------------------------

    def write(self, rows: Sequence[Row]) -> None:
        """Make rows durable, all or none; `UnavailableError` when it cannot be done."""
        self._note_size(rows)
        kept = history_within(self._history, self._row_bytes)
        compact_to = rows[-1][3] - kept
        compacts = compact_to - self.compacted > min(COMPACT_EVERY, kept)
        try:
            self._put(rows, compact_to if compacts else None)
        except sqlite3.Error as error:
            if not (_is_full(error) and self._makes_room()):
                raise _unavailable(self._path, error) from error
            try:
                self._put(rows, compact_to if compacts else None)
            except sqlite3.Error as again:
                raise _unavailable(self._path, again) from again
        if compacts:
            self.compacted = compact_to
        self._unfolded_bytes += sum(
            _PAGES_PER_ROW * _PAGE_BYTES + 2 * len(row[4] or b"") for row in rows
        )

    def _note_size(self, rows: Sequence[Row]) -> None:
        average = sum(len(row[4] or b"") for row in rows) // len(rows)
        # The mean of recent batches: one large object among many small ones does not count.
        self._row_bytes = (self._row_bytes * 15 + average) // 16

    def _put(self, rows: Sequence[Row], compact_to: int | None) -> None:
        try:
            if compact_to is not None or len(rows) > _ROWS_PER_STATEMENT:
                self._write_in_steps(rows, compact_to)
            else:
                # One statement is one transaction, and one hand-over of the interpreter's lock.
                self._insert(rows)
        except sqlite3.Error:
            self._roll_back()
            raise

    def _write_in_steps(self, rows: Sequence[Row], compact_to: int | None) -> None:
        self._connection.execute("BEGIN IMMEDIATE")
        for start in range(0, len(rows), _ROWS_PER_STATEMENT):
            self._insert(rows[start : start + _ROWS_PER_STATEMENT])
        if compact_to is not None:
            self._connection.execute("DELETE FROM history WHERE version <= ?", (compact_to,))
        self._connection.execute("COMMIT")

    def _insert(self, rows: Sequence[Row]) -> None:
        values = ",".join(("(?,?,?,?,?)",) * len(rows))
        self._connection.execute(
            f"INSERT INTO objects (kind, namespace, name, version, body) VALUES {values}{_TAIL}",  # noqa: S608 - placeholders only
            [value for row in rows for value in row],
        )

    def _roll_back(self) -> None:
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")

    # ---- folding the log -----------------------------------------------------------------

    def fold(self, *, is_idle: bool) -> None:
        """Fold the log into the database when there is enough of it."""
        if self._unfolded_bytes < TIGHT_CHECKPOINT_BYTES:
            return
        enough = IDLE_CHECKPOINT_BYTES if is_idle else CHECKPOINT_BYTES
        # The database may have to grow by all that is in the log: there must be room for it.
        tight = max(TIGHT_CHECKPOINT_BYTES, _free_bytes(self._path) // 2)
        if self._unfolded_bytes >= min(enough, tight):
            self._fold()

    def _fold(self) -> bool:
        self._unfolded_bytes = 0
        try:
            self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        except sqlite3.Error as error:
            # Nothing is lost: what is durable stays in the log until this succeeds.
            self._room_when_stuck = _free_bytes(self._path)
            log.warning(
                "the store's log could not be folded in",
                extra=fields(path=self._path, error=error),
            )
            return False
        self._room_when_stuck = -1
        return True

    def _makes_room(self) -> bool:
        """Fold the log on a full disk: what is written next takes the log's old place."""
        return _free_bytes(self._path) > self._room_when_stuck and self._fold()

    def close(self) -> None:
        """Fold everything in and close the file."""
        try:
            self._connection.close()
        except sqlite3.Error as error:
            raise _unavailable(self._path, error) from error


def _unavailable(path: Path, error: sqlite3.Error) -> UnavailableError:
    if _is_full(error):
        return UnavailableError(
            f"the disk of {path} is full ({_free_bytes(path)} bytes free): nothing was written",
            retry_after_seconds=5.0,
            hint="make room on that disk; writing goes on by itself then",
        )
    return UnavailableError(
        f"the store {path} cannot be written: {error} ({error.sqlite_errorname})",
        retry_after_seconds=5.0,
        hint="check the disk; the system's log may say more",
    )


def _is_full(error: sqlite3.Error) -> bool:
    return error.sqlite_errorname == "SQLITE_FULL"


def _free_bytes(path: Path) -> int:
    """Return how much room its disk has; none, if its directory was taken away from under it."""
    try:
        disk = os.statvfs(path.parent)
    except OSError:
        return 0
    return disk.f_bavail * disk.f_frsize


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _sync_directory(path: Path) -> None:
    """Make the file's name durable, not just its content."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
