"""The embedded store: the working set in memory, every acknowledged write durable in SQLite.

The only package that knows sqlite3.
"""

from paddock.store.sqlite.store import SqliteStore

__all__ = ["SqliteStore"]
