"""Encryption of the sqlite store: no plain text in its files, upgrades, rotation, crashes."""

import random
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from paddock.kit.encryption import DataCipher, EncryptionKey, create_key
from paddock.kit.errors import UnavailableError
from paddock.resources.kinds.template import SandboxTemplate, SandboxTemplateSpec
from paddock.resources.meta import ObjectMeta, with_meta
from paddock.store.sqlite import SqliteStore, schema
from paddock.store.sqlite import store as store_module
from paddock.store.sqlite.rewriting import RowRewriter

CANARY = "canary-7f3a91"


def template(name: str, text: str = CANARY) -> SandboxTemplate:
    return SandboxTemplate(
        metadata=ObjectMeta(namespace="default", name=name, annotations={"a": text}),
        spec=SandboxTemplateSpec(image="base", env={"SECRET": text}),
    )


def found_in(directory: Path, text: str = CANARY) -> list[str]:
    """The files below a directory whose bytes contain the text."""
    return sorted(
        path.name
        for path in directory.rglob("*")
        if path.is_file() and text.encode() in path.read_bytes()
    )


async def fill(path: Path, cipher: DataCipher | None, count: int = 40) -> dict[str, Any]:
    """Create, change and delete objects; return those that are left."""
    async with await SqliteStore.open(path, cipher=cipher) as store:
        for number in range(count):
            made = await store.create(template(f"t{number}", f"{CANARY} {number} " + "x" * 3000))
            await store.update(with_meta(made, labels={"n": str(number)}))
            if number % 4 == 0:
                await store.delete(SandboxTemplate, made.key)
        return await content(store)


async def content(store: SqliteStore) -> dict[str, Any]:
    return {item.metadata.name: item for item in (await store.list(SandboxTemplate)).items}


def make_older(path: Path) -> None:
    """Turn a file with plain rows into one of the version before encryption."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("DROP TABLE encryption")
        connection.execute("DROP TRIGGER changed")
        connection.execute(
            next(text for text in schema.MIGRATIONS[0] if "CREATE TRIGGER changed" in text)
        )
        connection.execute("PRAGMA user_version = 1")


async def test_no_file_of_the_store_contains_what_objects_hold(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    cipher = DataCipher([create_key()])
    async with await SqliteStore.open(path, cipher=cipher) as store:
        made = await store.create(template("a"))
        await store.update(with_meta(made, labels={"x": "y"}))
        await store.create(template("b"))
        await store.delete(SandboxTemplate, made.key)
        # While it runs, the newest rows are in the WAL.
        assert (tmp_path / "store.db-wal").stat().st_size
        assert found_in(tmp_path) == []
    assert found_in(tmp_path) == []
    async with await SqliteStore.open(path, cipher=cipher) as store:
        assert (await content(store))["b"].spec.env == {"SECRET": CANARY}


async def test_the_search_finds_a_canary_in_a_store_without_keys(tmp_path: Path) -> None:
    await fill(tmp_path / "store.db", None, 2)
    assert found_in(tmp_path) == ["store.db"]


async def test_a_store_of_an_older_version_is_encrypted_after_its_start(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    before = await fill(path, None)
    make_older(path)
    cipher = DataCipher([create_key()])
    async with await SqliteStore.open(path, cipher=cipher) as store:
        assert store.keys == {""}
        assert await content(store) == before
        watched = store.watch(SandboxTemplate, since="2")
        assert (await anext(watched)).object is not None, "the history is readable"
        await store.rewrite()
        assert store.keys == {cipher.key_id}
        assert found_in(tmp_path) == []
    async with await SqliteStore.open(path, cipher=cipher) as store:
        assert await content(store) == before
        events = store.watch(SandboxTemplate, since="2")
        assert (await anext(events)).version == "3"
    assert found_in(tmp_path) == []


async def test_deleted_plain_rows_are_removed_from_free_pages(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    async with await SqliteStore.open(path, history=1) as store:
        for number in range(50):
            await store.create(template(f"t{number}", CANARY * 300))
        for number in range(50):
            await store.delete(SandboxTemplate, template(f"t{number}").key)
        await store.create(template("last", "other"))
    assert found_in(tmp_path) == ["store.db"], "only free pages hold it"
    cipher = DataCipher([create_key()])
    async with await SqliteStore.open(path, cipher=cipher) as store:
        await store.rewrite()
        assert found_in(tmp_path) == []


async def test_rows_of_an_older_key_are_rewritten_under_load(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    old, new = create_key(), create_key()
    cipher = DataCipher([old])
    before = await fill(path, cipher, 600)
    async with await SqliteStore.open(path, cipher=cipher) as store:
        cipher.use([new, old])
        assert await content(store) == before
        await store.create(template("during"))
        assert store.keys == {old.id, new.id}
        changed = 0

        async def change() -> None:
            nonlocal changed
            for item in before.values():
                await store.update(with_meta(item, labels={"changed": "yes"}))
                changed += 1

        async with store_module.asyncio.TaskGroup() as tasks:
            tasks.create_task(change())
            tasks.create_task(store.rewrite())
        assert changed == len(before)
        # A row may have been copied to the history while others were rewritten.
        assert store.keys == {new.id}
    async with await SqliteStore.open(path, cipher=DataCipher([new])) as store:
        after = await content(store)
        assert after.keys() == before.keys() | {"during"}
        assert all(after[name].metadata.labels == {"changed": "yes"} for name in before)


@pytest.mark.parametrize("keys", [None, [create_key()]])
async def test_a_missing_key_fails_the_start_and_changes_nothing(
    keys: list[EncryptionKey] | None, tmp_path: Path
) -> None:
    path = tmp_path / "store.db"
    right = DataCipher([create_key()])
    before = await fill(path, right, 3)
    bytes_before = path.read_bytes()
    with pytest.raises(UnavailableError, match=f"{right.key_id}.*not in the keyring") as caught:
        await SqliteStore.open(path, cipher=None if keys is None else DataCipher(keys))
    assert "restore the keyring" in caught.value.hint
    assert path.read_bytes() == bytes_before
    async with await SqliteStore.open(path, cipher=right) as store:
        assert await content(store) == before


async def test_rows_cannot_be_exchanged(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    cipher = DataCipher([create_key()])
    await fill(path, cipher, 3)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        (body,) = connection.execute("SELECT body FROM objects WHERE name = 't1'").fetchone()
        connection.execute("UPDATE objects SET body = ? WHERE name = 't2'", (body,))
    with pytest.raises(UnavailableError, match="SandboxTemplate default t2 cannot be decrypted"):
        await SqliteStore.open(path, cipher=cipher)


# ---- crashes -----------------------------------------------------------------------------


async def _crash_at(
    point: int, path: Path, cipher: DataCipher, monkeypatch: pytest.MonkeyPatch
) -> bool:
    """Rewrite, and copy the files as a kill would leave them before statement `point`."""
    statements = 0
    copied = False

    class Counting:
        """A connection that notes the moment before each of its writes."""

        def __init__(self, connection: sqlite3.Connection) -> None:
            self._connection = connection

        def __getattr__(self, name: str) -> Any:
            return getattr(self._connection, name)

        def _note(self, sql: str) -> None:
            nonlocal statements, copied
            if sql.lstrip().startswith("SELECT") or copied:
                return
            statements += 1
            if statements == point:
                copied = True
                for suffix in ("", "-wal"):
                    if (source := Path(f"{path}{suffix}")).exists():
                        shutil.copy(source, path.parent / f"killed.db{suffix}")

        def execute(self, sql: str, *arguments: Any) -> sqlite3.Cursor:
            self._note(sql)
            return self._connection.execute(sql, *arguments)

        def executemany(self, sql: str, *arguments: Any) -> sqlite3.Cursor:
            self._note(sql)
            return self._connection.executemany(sql, *arguments)

    create: Callable[..., None] = RowRewriter.__init__
    with monkeypatch.context() as patched:
        patched.setattr(
            RowRewriter,
            "__init__",
            lambda self, connection, rows: create(self, Counting(connection), rows),
        )
        patched.setattr(store_module, "REWRITE_PAUSE_SECONDS", 0)
        async with await SqliteStore.open(path, cipher=cipher) as store:
            await store.rewrite()
    return copied


@pytest.mark.parametrize("rotates", [False, True])
async def test_a_kill_at_any_write_loses_nothing_and_the_next_start_continues(
    rotates: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paddock.store.sqlite.rewriting.BATCH", 12)
    old, new = create_key(), create_key()
    keys = [new, old] if rotates else [new]
    source = tmp_path / "source.db"
    before = await fill(source, DataCipher([old]) if rotates else None, 12)
    point, crashes = 0, 0
    while True:
        point += 1
        place = tmp_path / f"p{point}"
        place.mkdir()
        shutil.copy(source, place / "store.db")
        if not await _crash_at(point, place / "store.db", DataCipher(keys), monkeypatch):
            break
        crashes += 1
        (place / "store.db").unlink()
        async with await SqliteStore.open(place / "killed.db", cipher=DataCipher(keys)) as store:
            assert await content(store) == before, point
            assert store.keys - {new.id} or point > 1
            await store.rewrite()
            assert await content(store) == before, point
            assert store.keys == {new.id}
        # After the rewrite the new key alone is enough, and no plain text is left.
        async with await SqliteStore.open(place / "killed.db", cipher=DataCipher([new])) as store:
            assert await content(store) == before, point
        assert found_in(place) == []
        shutil.rmtree(place)
    assert crashes > 10


async def test_a_rewrite_that_fails_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store.db"
    before = await fill(path, None, 20)
    cipher = DataCipher([create_key()])
    rng = random.Random(3)
    compact = RowRewriter.compact

    def full(rewriter: RowRewriter) -> None:
        if rng.random() < 0.7:
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorname = "SQLITE_IOERR"
            raise error
        compact(rewriter)

    monkeypatch.setattr(RowRewriter, "compact", full)
    async with await SqliteStore.open(path, cipher=cipher) as store:
        failures = 0
        while "" in store.keys:
            try:
                await store.rewrite()
            except UnavailableError:
                failures += 1
                assert "" in store.keys
        assert failures
        assert await content(store) == before
        assert found_in(tmp_path) == []
