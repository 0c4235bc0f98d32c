"""The sqlite store: a working set in memory; every acknowledged write is durable in SQLite.

The only package that imports sqlite3.
"""

from paddock.store.sqlite.store import SqliteStore

__all__ = ["SqliteStore"]
