"""The sqlite store: restarts, durability before visibility, failed writes, limits."""

import asyncio
import os
import sqlite3
import stat
import subprocess
import sys
import threading
from contextlib import AsyncExitStack, aclosing, closing
from pathlib import Path

import pytest

from paddock.kit.errors import (
    AlreadyExistsError,
    ConflictError,
    GoneError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
)
from paddock.resources.kinds.builtin import Lease
from paddock.resources.kinds.template import SandboxTemplate
from paddock.resources.meta import Key, with_meta
from paddock.resources.selectors import parse_labels
from paddock.store import garbage
from paddock.store.sqlite import SqliteStore, schema
from paddock.store.sqlite.database import Database, Row
from tests.resources.mutation import accepted_changes
from tests.store.objects import (
    changes_since,
    eventually,
    exists,
    lease,
    owned_by,
    take,
    template,
    with_image,
    with_revision,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "store.db"


class Gate:
    """Blocks or fails the writes to the database of a store."""

    def __init__(self, store: SqliteStore) -> None:
        self._database: Database = store._journal._database  # pyright: ignore[reportAttributeAccessIssue]
        self._write = self._database.write
        self._database.write = self._guarded  # pyright: ignore[reportAttributeAccessIssue]
        self._is_open = threading.Event()
        self._is_open.set()
        self._failures = 0
        self.batches: list[int] = []

    def shut(self) -> None:
        self._is_open.clear()

    def open(self, *, failures: int = 0) -> None:
        self._failures = failures
        self._is_open.set()

    def _guarded(self, rows: list[Row]) -> None:
        self._is_open.wait(100)
        if self._failures:
            self._failures -= 1
            raise UnavailableError("the disk is full", retry_after_seconds=5)
        self.batches.append(len(rows))
        self._write(rows)


class TestRestarting:
    async def test_loaded_objects_are_immutable(self, path: Path):
        async with await SqliteStore.open(path) as store:
            for name in ("a", "b"):
                made = await store.create(template("x", name, labels={"l": "1"}))
                await store.update(with_image(made, "new"))
        async with await SqliteStore.open(path) as store:
            page = await store.list(SandboxTemplate)
            events = store.watch(SandboxTemplate, since=str(int(page.version) - 2))
            async with aclosing(events) as stream:
                past = [event.object for event in await take(stream, 2)]
            for obj in (*page.items, *past):
                assert obj.metadata.labels == {"l": "1"}
                assert list(accepted_changes(obj)) == []

    async def test_objects_survive_a_restart(self, path: Path):
        async with await SqliteStore.open(path) as store:
            made = await store.create(template("x", "a", labels={"l": "1"}))
            changed = await store.update(with_image(made, "new"))
            stated = await store.update_status(with_revision(changed, "r1"))
            held = await store.create(lease("x", "a", "me"))
            gone = await store.create(template("x", "gone"))
            await store.delete(SandboxTemplate, gone.key)
            version = (await store.list(SandboxTemplate)).version

        async with await SqliteStore.open(path) as store:
            assert (await store.list(SandboxTemplate)).items == (stated,)
            assert await store.get(Lease, held.key) == held
            assert (await store.list(SandboxTemplate)).version == version

    async def test_versions_continue_after_a_restart_even_if_the_newest_object_was_deleted(
        self, path: Path
    ):
        async with await SqliteStore.open(path) as store:
            made = await store.create(template("x", "a"))
            last = await store.delete(SandboxTemplate, made.key)
        async with await SqliteStore.open(path) as store:
            made = await store.create(template("x", "b"))
            assert int(made.metadata.resource_version) > int(last.metadata.resource_version)

    async def test_a_watch_resumes_after_a_restart(self, path: Path):
        async with await SqliteStore.open(path) as store:
            since = (await store.list(SandboxTemplate)).version
            a = await store.create(template("x", "a", labels={"app": "web"}))
            b = await store.create(template("x", "b"))
            a = await store.update(with_image(a, "new"))
            await store.delete(SandboxTemplate, b.key)
            b = await store.create(template("x", "b", labels={"app": "web"}))
            a = await store.update(with_meta(a, labels={}))
        expected = [
            ("ADDED", "a"),
            ("ADDED", "b"),
            ("MODIFIED", "a"),
            ("DELETED", "b"),
            ("ADDED", "b"),
            ("MODIFIED", "a"),
            ("ADDED", "c"),
        ]
        async with await SqliteStore.open(path) as store:
            await store.create(template("x", "c"))
            assert await changes_since(store, SandboxTemplate, since, 7) == expected
            selected = await changes_since(
                store, SandboxTemplate, since, 4, labels=parse_labels("app=web")
            )
        assert selected == [("ADDED", "a"), ("MODIFIED", "a"), ("ADDED", "b"), ("DELETED", "a")]

    async def test_a_list_is_continued_after_a_restart(self, path: Path):
        async with await SqliteStore.open(path) as store:
            for name in "abcd":
                await store.create(template("x", name))
            first = await store.list(SandboxTemplate, limit=2)
            await store.delete(SandboxTemplate, Key("x", "c"))
        async with await SqliteStore.open(path) as store:
            rest = await store.list(SandboxTemplate, continue_token=first.continue_token)
        assert [item.metadata.name for item in rest.items] == ["c", "d"]

    async def test_the_history_in_the_file_is_bounded(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr("paddock.store.sqlite.database.COMPACT_EVERY", 16)
        async with await SqliteStore.open(path, history=20) as store:
            since = (await store.list(SandboxTemplate)).version
            obj = await store.create(template("x", "a"))
            for number in range(100):
                obj = await store.update_status(with_revision(obj, str(number)))
            recent = obj.metadata.resource_version
            await store.update(with_image(obj, "new"))
        with closing(sqlite3.connect(path)) as connection:
            rows = connection.execute("SELECT count(*) FROM history").fetchone()[0]
        assert 20 <= rows <= 20 + 17
        async with await SqliteStore.open(path, history=20) as store:
            with pytest.raises(GoneError):
                await changes_since(store, SandboxTemplate, since, 1)
            assert await changes_since(store, SandboxTemplate, recent, 1) == [("MODIFIED", "a")]

    async def test_uncollected_dependents_are_collected_after_a_restart(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        async with await SqliteStore.open(path) as store:
            owner = await store.create(template("x", "owner"))
            for number in range(20):
                await store.create(template("x", f"n{number}", owner_references=owned_by(owner)))
            # As if the process had ended after the first chunk.
            monkeypatch.setattr(garbage, "CHUNK", 5)
            monkeypatch.setattr(store, "collect_later", lambda *_: None)
            await store.delete(SandboxTemplate, owner.key)
            assert len((await store.list(SandboxTemplate)).items) > 10

        async with await SqliteStore.open(path) as store:

            async def all_gone() -> bool:
                return not (await store.list(SandboxTemplate)).items

            await eventually(all_gone)

    async def test_objects_of_an_unknown_kind_are_kept_in_the_file(self, path: Path):
        async with await SqliteStore.open(path) as store:
            held = await store.create(lease("x", "a", "me"))
        async with await SqliteStore.open(path, kinds=[SandboxTemplate]) as store:
            made = await store.create(template("x", "a"))
            assert int(made.metadata.resource_version) > int(held.metadata.resource_version)
        async with await SqliteStore.open(path) as store:
            assert await store.get(Lease, held.key) == held


class TestOpening:
    async def test_the_file_is_readable_by_its_owner_only(self, path: Path):
        async with await SqliteStore.open(path) as store:
            await store.create(template("x", "a"))
            for file in path.parent.iterdir():
                assert stat.S_IMODE(file.stat().st_mode) & 0o077 == 0, file

    async def test_the_error_for_a_second_process_names_the_holder_of_the_store(self, path: Path):
        program = (
            "import asyncio, pathlib, sys\n"
            "from paddock.store.sqlite import SqliteStore\n"
            "asyncio.run(SqliteStore.open(pathlib.Path(sys.argv[1])))\n"
        )
        async with await SqliteStore.open(path):
            done = await asyncio.to_thread(
                subprocess.run,
                [sys.executable, "-c", program, str(path)],
                capture_output=True,
                text=True,
                check=False,
            )
        assert done.returncode == 1
        assert f"{path} is in use by process {os.getpid()} (" in done.stderr

    async def test_the_store_can_be_opened_again_at_once(self, path: Path):
        for _ in range(3):
            async with await SqliteStore.open(path):
                pass

    async def test_a_forked_child_does_not_hold_the_store(self, path: Path):
        read_end, write_end = os.pipe()
        store = await SqliteStore.open(path)
        child = os.fork()
        if child == 0:
            os.close(write_end)
            os.read(read_end, 1)
            os._exit(0)
        os.close(read_end)
        try:
            await store.close()
            async with await SqliteStore.open(path):
                pass
        finally:
            os.close(write_end)
            os.waitpid(child, 0)

    async def test_a_newer_schema_is_rejected_and_not_modified(self, path: Path):
        async with await SqliteStore.open(path) as store:
            await store.create(template("x", "a"))
        newer = len(schema.MIGRATIONS) + 1
        with sqlite3.connect(path) as connection:
            connection.execute(f"PRAGMA user_version = {newer}")
        connection.close()
        with pytest.raises(UnsupportedError, match=f"schema is {newer}"):
            await SqliteStore.open(path)
        with sqlite3.connect(path) as connection:
            assert connection.execute("PRAGMA user_version").fetchone()[0] == newer
            assert connection.execute("SELECT count(*) FROM objects").fetchone()[0] == 1
        connection.close()

    async def test_an_older_schema_is_migrated(self, path: Path, monkeypatch: pytest.MonkeyPatch):
        async with await SqliteStore.open(path) as store:
            made = await store.create(template("x", "a"))
        later = (*schema.MIGRATIONS, ("CREATE TABLE later (id INTEGER)",))
        monkeypatch.setattr(schema, "MIGRATIONS", later)
        async with await SqliteStore.open(path) as store:
            assert await store.get(SandboxTemplate, made.key) == made
        connection = sqlite3.connect(path)
        assert connection.execute("PRAGMA user_version").fetchone()[0] == len(later)
        assert connection.execute("SELECT count(*) FROM later").fetchone()[0] == 0
        connection.close()

    async def test_a_failed_migration_does_not_change_the_file(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        async with await SqliteStore.open(path) as store:
            made = await store.create(template("x", "a"))
        broken = (*schema.MIGRATIONS, ("CREATE TABLE later (id INTEGER)", "NO SUCH STATEMENT"))
        with monkeypatch.context() as patch:
            patch.setattr(schema, "MIGRATIONS", broken)
            with pytest.raises(UnavailableError, match="cannot be opened"):
                await SqliteStore.open(path)
        async with await SqliteStore.open(path) as store:
            assert await store.get(SandboxTemplate, made.key) == made

    async def test_the_database_of_another_application_is_rejected(self, path: Path):
        path.parent.mkdir()
        with sqlite3.connect(path) as connection:
            connection.execute("CREATE TABLE theirs (id INTEGER)")
        connection.close()
        with pytest.raises(UnsupportedError, match="another application"):
            await SqliteStore.open(path)

    async def test_a_file_that_is_not_a_database_is_rejected(self, path: Path):
        path.parent.mkdir()
        path.write_text("not a database at all, " * 100)
        with pytest.raises(UnavailableError, match="cannot be opened"):
            await SqliteStore.open(path)


class TestCommitting:
    async def test_a_write_is_not_visible_before_it_is_durable(self, path: Path):
        async with await SqliteStore.open(path) as store:
            made = await store.create(template("x", "a"))
            since = made.metadata.resource_version
            gate = Gate(store)
            gate.shut()
            update = asyncio.ensure_future(store.update(with_image(made, "new")))
            create = asyncio.ensure_future(store.create(template("x", "b")))
            seen = asyncio.ensure_future(changes_since(store, SandboxTemplate, since, 2))
            await asyncio.sleep(0.05)

            assert await store.get(SandboxTemplate, made.key) == made
            assert (await store.list(SandboxTemplate)).items == (made,)
            assert (await store.list(SandboxTemplate)).version == since
            assert not update.done()
            assert not create.done()
            assert not seen.done()

            gate.open()
            changed = await update
            assert await store.get(SandboxTemplate, made.key) == changed
            assert await exists(store, SandboxTemplate, (await create).key)
            assert await seen == [("MODIFIED", "a"), ("ADDED", "b")]

    async def test_an_error_waits_for_the_write_it_depends_on(self, path: Path):
        async with await SqliteStore.open(path) as store:
            made = await store.create(template("x", "a"))
            gate = Gate(store)
            gate.shut()
            first = asyncio.ensure_future(store.update(with_image(made, "first")))
            created = asyncio.ensure_future(store.create(template("x", "b")))
            await asyncio.sleep(0.02)
            second = asyncio.ensure_future(store.update(with_image(made, "second")))
            again = asyncio.ensure_future(store.create(template("x", "b")))
            await asyncio.sleep(0.05)
            assert not second.done()
            assert not again.done()
            gate.open()
            with pytest.raises(ConflictError):
                await second
            with pytest.raises(AlreadyExistsError):
                await again
            assert (await first).spec.image == "first"
            await created

    async def test_many_writers_share_one_commit(self, path: Path):
        async with await SqliteStore.open(path) as store:
            made = [await store.create(template("x", f"n{number}")) for number in range(64)]
            gate = Gate(store)
            await asyncio.gather(*(store.update(with_image(obj, "new")) for obj in made))
            assert gate.batches == [64]

    async def test_watchers_get_all_writes_to_one_object_of_one_batch_in_order(self, path: Path):
        async with await SqliteStore.open(path) as store:
            made = await store.create(template("x", "a"))
            gate = Gate(store)
            gate.shut()
            holding = asyncio.ensure_future(store.create(template("x", "holding")))
            await asyncio.sleep(0.02)
            update = asyncio.ensure_future(store.update(with_image(made, "new")))
            await asyncio.sleep(0.02)
            delete = asyncio.ensure_future(store.delete(SandboxTemplate, made.key))
            await asyncio.sleep(0.02)
            anew = asyncio.ensure_future(store.create(template("x", "a", image="anew")))
            await asyncio.sleep(0.02)
            gate.open()
            await asyncio.gather(holding, update, delete, anew)
            assert gate.batches == [1, 3]
            since = made.metadata.resource_version
        async with await SqliteStore.open(path) as store:
            seen = await changes_since(store, SandboxTemplate, since, 4)
            assert (await store.get(SandboxTemplate, made.key)).spec.image == "anew"
        assert seen == [("ADDED", "holding"), ("MODIFIED", "a"), ("DELETED", "a"), ("ADDED", "a")]

    async def test_cancelling_a_writer_does_not_cancel_the_write(self, path: Path):
        async with await SqliteStore.open(path) as store:
            gate = Gate(store)
            gate.shut()
            impatient = asyncio.ensure_future(store.create(template("x", "a")))
            patient = asyncio.ensure_future(store.create(template("x", "b")))
            await asyncio.sleep(0.02)
            impatient.cancel()
            await asyncio.wait([impatient])
            gate.open()
            await patient
            assert await exists(store, SandboxTemplate, Key("x", "a"))

    async def test_close_waits_for_writes_in_flight(self, path: Path):
        store = await SqliteStore.open(path)
        writes = [
            asyncio.ensure_future(store.create(template("x", f"n{number}"))) for number in range(50)
        ]
        await asyncio.sleep(0)
        await store.close()
        made = await asyncio.gather(*writes)
        async with await SqliteStore.open(path) as store:
            assert len((await store.list(SandboxTemplate)).items) == len(made) == 50


class TestFailing:
    async def test_a_failed_batch_is_rolled_back_with_the_writes_that_depend_on_it(
        self, path: Path
    ):
        async with await SqliteStore.open(path) as store:
            made = await store.create(template("x", "a"))
            gate = Gate(store)
            gate.shut()
            first = asyncio.ensure_future(store.update(with_image(made, "first")))
            await asyncio.sleep(0.02)
            # Decided while the first batch is being written, and part of the next one.
            on_top = asyncio.ensure_future(store.create(template("x", "b")))
            await asyncio.sleep(0.02)
            gate.open(failures=1)
            for write in (first, on_top):
                with pytest.raises(UnavailableError, match="disk is full"):
                    await write
            assert await store.get(SandboxTemplate, made.key) == made
            assert not await exists(store, SandboxTemplate, Key("x", "b"))

            changed = await store.update(with_image(made, "after"))
            assert changed.spec.image == "after"
            assert int(changed.metadata.resource_version) > int(made.metadata.resource_version)
        async with await SqliteStore.open(path) as store:
            assert (await store.list(SandboxTemplate)).items == (changed,)

    async def test_a_result_that_depends_on_a_failed_write_is_decided_again(self, path: Path):
        async with await SqliteStore.open(path) as store:
            made = await store.create(template("x", "a"))
            gate = Gate(store)
            gate.shut()
            first = asyncio.ensure_future(store.delete(SandboxTemplate, made.key))
            await asyncio.sleep(0.02)
            # NotFound if the deletion succeeded, but it fails.
            second = asyncio.ensure_future(store.update(with_image(made, "second")))
            await asyncio.sleep(0.02)
            gate.open(failures=1)
            with pytest.raises(UnavailableError):
                await first
            assert (await second).spec.image == "second"

    async def test_versions_of_failed_writes_are_not_reused(self, path: Path):
        async with await SqliteStore.open(path) as store:
            gate = Gate(store)
            gate.open(failures=1)
            with pytest.raises(UnavailableError):
                await store.create(template("x", "a"))
            since = (await store.list(SandboxTemplate)).version
            made = await store.create(template("x", "a"))
            assert int(made.metadata.resource_version) == int(since) + 2
            assert await changes_since(store, SandboxTemplate, since, 1) == [("ADDED", "a")]

    async def test_dependents_are_collected_after_the_store_is_writable_again(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr(garbage, "CHUNK", 5)
        async with await SqliteStore.open(path) as store:
            owner = await store.create(template("x", "owner"))
            for number in range(20):
                await store.create(template("x", f"n{number}", owner_references=owned_by(owner)))
            await store.delete(SandboxTemplate, owner.key)
            gate = Gate(store)
            gate.open(failures=1)

            async def has_failed() -> bool:
                return gate._failures == 0

            await eventually(has_failed)
            await store.create(template("x", "other"))

            async def only_the_other_is_left() -> bool:
                return len((await store.list(SandboxTemplate)).items) == 1

            await eventually(only_the_other_is_left)

    @pytest.mark.faults
    async def test_writes_fail_on_a_full_disk_until_space_is_freed(self, tmp_path: Path):
        if os.geteuid() != 0:
            pytest.skip("mounting a small file system needs root")
        disk = tmp_path / "disk"
        disk.mkdir()
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], check=False
        )
        if mounted.returncode != 0:
            pytest.skip("this machine does not let root mount a tmpfs")
        async with AsyncExitStack() as stack:
            stack.callback(subprocess.run, ["umount", "-l", str(disk)], check=True)
            ballast = disk / "ballast"
            ballast.write_bytes(bytes(1_000_000))
            path = disk / "store.db"
            store = await SqliteStore.open(path)
            stored: dict[Key, SandboxTemplate] = {}
            refusal: UnavailableError | None = None
            while refusal is None:
                obj = template("x", f"n{len(stored)}", annotations={"fill": "x" * 2000})
                try:
                    made = await store.create(obj)
                except UnavailableError as error:
                    refusal = error
                else:
                    stored[made.key] = made
            assert "full" in refusal.message
            assert refusal.hint
            refused = Key("x", f"n{len(stored)}")

            # No write is partial, and reads still work.
            assert len(stored) > 50
            with pytest.raises(NotFoundError):
                await store.get(SandboxTemplate, refused)
            assert {item.key: item for item in (await store.list(SandboxTemplate)).items} == stored

            ballast.unlink()
            made = await store.create(template("x", refused.name))
            stored[made.key] = made
            await store.close()
            async with await SqliteStore.open(path) as again:
                listed = await again.list(SandboxTemplate)
            assert {item.key: item for item in listed.items} == stored
