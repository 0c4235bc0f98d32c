"""The database schema and its migrations.

`objects` is the newest state. `history` is the undo log for watches and continued lists: the
object before each change. Triggers write it, so that every change has an entry; a deletion is an
update whose body is NULL. A batch is therefore one statement. Bodies are encrypted if the store has
keys (`rows`); `encryption` lists the keys.

To change the schema, append a migration; never edit one that was released.
"""

import sqlite3

from paddock.kit.errors import UnsupportedError

APPLICATION_ID = 0x7061646B
"""Marks the file as a Paddock store: `padk`."""

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """
        CREATE TABLE objects (
            id INTEGER PRIMARY KEY,
            kind TEXT NOT NULL,
            namespace TEXT NOT NULL,
            name TEXT NOT NULL,
            version INTEGER NOT NULL,
            body BLOB,
            UNIQUE (kind, namespace, name)
        )
        """,
        """
        CREATE TABLE history (
            version INTEGER PRIMARY KEY,
            kind TEXT NOT NULL,
            namespace TEXT NOT NULL,
            name TEXT NOT NULL,
            before BLOB
        )
        """,
        """
        CREATE TRIGGER added AFTER INSERT ON objects BEGIN
            INSERT INTO history VALUES (new.version, new.kind, new.namespace, new.name, NULL);
        END
        """,
        """
        CREATE TRIGGER changed AFTER UPDATE ON objects BEGIN
            INSERT INTO history VALUES (new.version, new.kind, new.namespace, new.name, old.body);
            DELETE FROM objects WHERE id = new.id AND new.body IS NULL;
        END
        """,
        f"PRAGMA application_id = {APPLICATION_ID}",
    ),
    (
        # Rewriting a body with another key is no change of the object: only `version` marks one.
        "DROP TRIGGER changed",
        """
        CREATE TRIGGER changed AFTER UPDATE OF version ON objects BEGIN
            INSERT INTO history VALUES (new.version, new.kind, new.namespace, new.name, old.body);
            DELETE FROM objects WHERE id = new.id AND new.body IS NULL;
        END
        """,
        # The keys that data in the file may be encrypted with, in free pages too; '' is plain text.
        "CREATE TABLE encryption (key TEXT PRIMARY KEY)",
        "INSERT INTO encryption SELECT '' WHERE EXISTS (SELECT 1 FROM history)",
    ),
)


def migrate(connection: sqlite3.Connection) -> int:
    """Migrate a file to the newest schema and return the version it had."""
    before: int = connection.execute("PRAGMA user_version").fetchone()[0]
    newest = len(MIGRATIONS)
    if before > newest:
        raise UnsupportedError(
            f"the store was written by a newer Paddock: its schema is {before}, "
            f"this version supports up to {newest}",
            hint="start the newer version, or restore a backup made by this one",
        )
    if before == 0 and connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:
        raise UnsupportedError(
            "the file is a database of another application",
            hint="choose another data directory",
        )
    for number in range(before, newest):
        connection.execute("BEGIN IMMEDIATE")
        try:
            for statement in MIGRATIONS[number]:
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {number + 1}")
            connection.execute("COMMIT")
        except BaseException:
            connection.execute("ROLLBACK")
            raise
    return before
