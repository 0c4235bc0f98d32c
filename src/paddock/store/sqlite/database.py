"""The database file: read at start-up, written in batches that are durable when `write` returns.

Synchronous, and used by one thread at a time. Order and visibility of batches are in `journal`.
"""

import logging
import os
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from paddock.kit.encryption import DataCipher
from paddock.kit.errors import UnavailableError
from paddock.kit.logs import fields
from paddock.store.sqlite.rewriting import RowRewriter
from paddock.store.sqlite.rows import RowCodec
from paddock.store.sqlite.schema import migrate
from paddock.store.table import history_within

log = logging.getLogger(__name__)

COMPACT_EVERY = 512
"""Versions by which the history may exceed its limit; one statement then deletes them."""
CHECKPOINT_BYTES = 48 * 1024 * 1024
"""WAL size at which a checkpoint always runs."""
IDLE_CHECKPOINT_BYTES = 4 * 1024 * 1024
"""WAL size at which a checkpoint runs when no write is waiting."""
TIGHT_CHECKPOINT_BYTES = 1024 * 1024
"""WAL size below which no checkpoint runs, even if the disk is nearly full."""
_PAGE_BYTES = 4096
_PAGES_PER_ROW = 2
_COLUMNS = 5
_ROWS_PER_STATEMENT = 32_000 // _COLUMNS
_UPSERT = (
    " ON CONFLICT (kind, namespace, name)"
    " DO UPDATE SET version = excluded.version, body = excluded.body"
)

Row = tuple[str, str, str, int, bytes | None]
"""Kind, namespace, name, version, body; a body of `None` deletes the object."""


class HistoryEntry(NamedTuple):
    """One row of the history: the object before a change."""

    version: int
    kind: str
    namespace: str
    name: str
    before: bytes | None


class Database:
    """One open database file."""

    def __init__(self, path: Path, *, history: int, cipher: DataCipher | None = None) -> None:
        self._path = path
        self._rows = RowCodec(cipher)
        self._history = history
        self._row_bytes = 0
        self._free_at_failure = -1
        try:
            self._connection = self._open()
        except sqlite3.Error as error:
            raise UnavailableError(
                f"the store {path} cannot be opened: {error}",
                hint="check the file and its directory, or restore a backup",
            ) from error
        self._rewriter = RowRewriter(self._connection, self._rows)
        # Processes that were killed may have left a long WAL.
        self._wal_bytes = _size(path.with_name(f"{path.name}-wal"))
        oldest = self._connection.execute("SELECT min(version) FROM history").fetchone()[0]
        self.compacted = 0 if oldest is None else int(oldest) - 1
        """The newest version that is no longer in the history."""

    def _open(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self._path, isolation_level=None, check_same_thread=False, cached_statements=256
        )
        try:
            connection.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
            # Exclusive mode needs no shared memory file: no other process opens this database, and
            # writing to a file mapped on a full disk would kill the process with SIGBUS.
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
        """Return the newest version ever stored; 0 for a new file."""
        newest = 0
        for table in ("history", "objects"):
            row = self._connection.execute(f"SELECT max(version) FROM {table}").fetchone()  # noqa: S608 - fixed names
            newest = max(newest, row[0] or 0)
        return newest

    def objects(self) -> Iterator[tuple[str, bytes]]:
        """Return kind and body of every object."""
        query = "SELECT kind, namespace, name, body FROM objects"
        for kind, namespace, name, stored in self._connection.execute(query):
            yield kind, self._rows.decode(kind, namespace, name, stored)

    def changes(self) -> Iterator[HistoryEntry]:
        """Return the history, newest first."""
        query = "SELECT version, kind, namespace, name, before FROM history ORDER BY version DESC"
        for version, kind, namespace, name, stored in self._connection.execute(query):
            before = stored and self._rows.decode(kind, namespace, name, stored)
            yield HistoryEntry(version, kind, namespace, name, before)

    # ---- writing -------------------------------------------------------------------------

    def write(self, rows: Sequence[Row]) -> None:
        """Make rows durable, all or none; `UnavailableError` if that fails."""
        self._measure(rows)
        rows = [self._encoded(row) for row in rows]
        kept = history_within(self._history, self._row_bytes)
        compact_to = rows[-1][3] - kept
        compacts = compact_to - self.compacted > min(COMPACT_EVERY, kept)
        try:
            self._rewriter.note_key()
            self._write(rows, compact_to if compacts else None)
        except sqlite3.Error as error:
            if not (_is_full(error) and self._free_space()):
                raise _unavailable(self._path, error) from error
            try:
                self._write(rows, compact_to if compacts else None)
            except sqlite3.Error as again:
                raise _unavailable(self._path, again) from again
        if compacts:
            self.compacted = compact_to
        self._wal_bytes += sum(
            _PAGES_PER_ROW * _PAGE_BYTES + 2 * len(row[4] or b"") for row in rows
        )

    def _encoded(self, row: Row) -> Row:
        kind, namespace, name, version, body = row
        if body is None:
            return row
        return kind, namespace, name, version, self._rows.encode(kind, namespace, name, body)

    def _measure(self, rows: Sequence[Row]) -> None:
        average = sum(len(row[4] or b"") for row in rows) // len(rows)
        # A moving average, so that one large object among many small ones has little effect.
        self._row_bytes = (self._row_bytes * 15 + average) // 16

    def _write(self, rows: Sequence[Row], compact_to: int | None) -> None:
        try:
            if compact_to is not None or len(rows) > _ROWS_PER_STATEMENT:
                self._write_in_steps(rows, compact_to)
            else:
                # One statement is one transaction, and releases the GIL once.
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
            f"INSERT INTO objects (kind, namespace, name, version, body) VALUES {values}{_UPSERT}",  # noqa: S608 - placeholders only
            [value for row in rows for value in row],
        )

    def _roll_back(self) -> None:
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")

    # ---- keys ----------------------------------------------------------------------------

    @property
    def keys(self) -> frozenset[str]:
        """The keys that data in the file may be encrypted with; '' is plain text."""
        return frozenset(self._rewriter.keys)

    @property
    def needs_rewrite(self) -> bool:
        """Whether the file may hold data that the key in use did not encrypt."""
        return self._rewriter.is_needed

    def rewrite(self) -> bool:
        """Rewrite some rows with the key in use; return whether there may be more."""
        try:
            size = self._rewriter.step()
            if size is None:
                self._rewriter.compact()
                self._wal_bytes = 0
                return False
        except sqlite3.Error as error:
            raise _unavailable(self._path, error) from error
        self._wal_bytes += size * _PAGES_PER_ROW * _PAGE_BYTES
        return True

    # ---- checkpoints ---------------------------------------------------------------------

    def checkpoint(self, *, is_idle: bool) -> None:
        """Run a WAL checkpoint if the WAL is large enough."""
        if self._wal_bytes < TIGHT_CHECKPOINT_BYTES:
            return
        enough = IDLE_CHECKPOINT_BYTES if is_idle else CHECKPOINT_BYTES
        # A checkpoint may grow the database by the size of the WAL, which needs free space.
        tight = max(TIGHT_CHECKPOINT_BYTES, _free_bytes(self._path) // 2)
        if self._wal_bytes >= min(enough, tight):
            self._checkpoint()

    def _checkpoint(self) -> bool:
        self._wal_bytes = 0
        try:
            self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        except sqlite3.Error as error:
            # Nothing is lost: the data stays in the WAL until a checkpoint succeeds.
            self._free_at_failure = _free_bytes(self._path)
            log.warning(
                "WAL checkpoint failed",
                extra=fields(path=self._path, error=error),
            )
            return False
        self._free_at_failure = -1
        return True

    def _free_space(self) -> bool:
        """Run a checkpoint on a full disk: the next writes reuse the space of the WAL."""
        return _free_bytes(self._path) > self._free_at_failure and self._checkpoint()

    def close(self) -> None:
        """Run a final checkpoint and close the file."""
        try:
            self._connection.close()
        except sqlite3.Error as error:
            raise _unavailable(self._path, error) from error


def _unavailable(path: Path, error: sqlite3.Error) -> UnavailableError:
    if _is_full(error):
        return UnavailableError(
            f"the disk of {path} is full ({_free_bytes(path)} bytes free): nothing was written",
            retry_after_seconds=5.0,
            hint="free disk space; writes then resume without a restart",
        )
    return UnavailableError(
        f"the store {path} cannot be written: {error} ({error.sqlite_errorname})",
        retry_after_seconds=5.0,
        hint="check the disk and the kernel log",
    )


def _is_full(error: sqlite3.Error) -> bool:
    return error.sqlite_errorname == "SQLITE_FULL"


def _free_bytes(path: Path) -> int:
    """Return the free space of the disk; 0 if the directory was removed."""
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
    """Make the directory entry of the file durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
