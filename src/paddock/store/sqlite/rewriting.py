"""Rewriting of rows with the key in use: those of an older version, and those of an older key.

Runs in small transactions between other writes; a crash loses at most one of them, and the next
start continues. The table `encryption` names the keys that may still occur in the file. A key is
removed from it only after the file was compacted: until then, free pages and the WAL may hold rows
as they were before.
"""

import sqlite3
from collections.abc import Iterator
from typing import NamedTuple

from paddock.kit.errors import UnavailableError
from paddock.store.sqlite.rows import RowCodec

BATCH = 256
"""Rows that one transaction rewrites."""


class _Column(NamedTuple):
    table: str
    id: str
    body: str


_COLUMNS = (_Column("objects", "id", "body"), _Column("history", "version", "before"))
"""Objects first: as long as one has an old body, its next change copies it to the history."""


class RowRewriter:
    """Rewrites the rows of one database. Used on the thread of the database."""

    def __init__(self, connection: sqlite3.Connection, rows: RowCodec) -> None:
        self._connection = connection
        self._rows = rows
        self._steps: Iterator[int] = iter(())
        self._steps_key: str | None = None
        self.keys = {str(key) for (key,) in connection.execute("SELECT key FROM encryption")}
        """The keys that data in the file may be encrypted with; '' is plain text."""

    @property
    def is_needed(self) -> bool:
        """Whether rows of another key may be in the file."""
        return bool(self.keys - {self._rows.key})

    def note_key(self) -> None:
        """Record the key in use before the first row is written with it."""
        if (key := self._rows.key) not in self.keys:
            self._connection.execute("INSERT OR IGNORE INTO encryption VALUES (?)", (key,))
            self.keys.add(key)

    def step(self) -> int | None:
        """Rewrite a batch and return its size; None when every row has the key in use."""
        self.note_key()
        if self._steps_key != self._rows.key:
            self._steps_key = self._rows.key
            self._steps = (size for column in _COLUMNS for size in self._rewrite(column))
        size: int | None = None
        try:
            size = next(self._steps, None)
        finally:
            if size is None:  # complete, or failed: the next step begins anew
                self._steps_key = None
        return size

    def _rewrite(self, column: _Column) -> Iterator[int]:
        last, prefix = -1, self._rows.prefix
        table, identity, body = column
        query = (
            f"SELECT {identity}, kind, namespace, name, {body} FROM {table}"  # noqa: S608 - fixed names
            f" WHERE {identity} > ? AND substr({body}, 1, ?) != ? ORDER BY {identity} LIMIT ?"
        )
        while True:
            found = self._connection.execute(query, (last, len(prefix), prefix, BATCH)).fetchall()
            if not found:
                return
            changed: list[tuple[bytes, int]] = []
            for row_id, kind, namespace, name, stored in found:
                plain = self._rows.decode(kind, namespace, name, stored)
                changed.append((self._rows.encode(kind, namespace, name, plain), row_id))
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                self._connection.executemany(
                    f"UPDATE {table} SET {body} = ? WHERE {identity} = ?",  # noqa: S608 - fixed names
                    changed,
                )
                self._connection.execute("COMMIT")
            except sqlite3.Error:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise
            last = found[-1][0]
            yield len(found)

    def compact(self) -> None:
        """Remove what earlier versions of rows have left in free pages and in the WAL."""
        self._connection.execute("VACUUM")
        self._empty_wal()
        key = self._rows.key
        self._connection.execute("DELETE FROM encryption WHERE key != ?", (key,))
        self.keys = {key}

    def _empty_wal(self) -> None:
        blocked, *_ = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if blocked:
            raise UnavailableError("the WAL of the store is in use and cannot be emptied")
