"""Model test: the sqlite store returns the same as the memory store, also after a crash."""

import asyncio
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from msgspec import structs

from paddock.kit import ids
from paddock.kit.clock import ManualClock
from paddock.kit.errors import PaddockError
from paddock.resources.kinds.builtin import Lease
from paddock.resources.kinds.template import SandboxTemplate
from paddock.resources.meta import Key, Resource, with_meta
from paddock.resources.selectors import parse_labels
from paddock.store.memory import MemoryStore
from paddock.store.port import Propagation, Store
from paddock.store.sqlite import SqliteStore
from tests.store.objects import lease, owned_by, take, template, with_image, with_revision

NAMES = ["a", "b", "c", "d", "e"]
names = st.sampled_from(NAMES)
finalizers = st.sampled_from([(), ("x.dev/one",), ("x.dev/one", "x.dev/two")])
labels = st.sampled_from([{}, {"app": "web"}, {"app": "db"}, {"app": "web", "tier": "x"}])
propagations = st.sampled_from(list(Propagation))
selectors = st.sampled_from([None, "app=web", "app!=web", "!tier"])

Operation = Callable[[Store], Awaitable[Any]]


class Stores(RuleBasedStateMachine):
    """Runs every operation on both stores and compares the results."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.steps = 0
        # Both stores generate the same uid and the same name in one step.
        self.patch.setattr(ids, "uid", lambda: f"{self.steps:08}-0000-4000-8000-000000000000")
        self.patch.setattr(ids, "name_suffix", lambda _=5: f"{self.steps:05}")
        self.runner = asyncio.Runner()
        # Use a memory file system if there is one: this test is not about disks.
        shared = Path("/dev/shm")
        self.directory = Path(
            tempfile.mkdtemp(prefix="paddock-model-", dir=shared if shared.is_dir() else None)
        )
        self.clock = ManualClock()
        self.memory: Any = None
        self.sqlite: Any = None
        self.versions = ["1"]
        self.past: list[Resource] = []

    @initialize()
    def begin(self) -> None:
        self.memory = MemoryStore(clock=self.clock)
        self.path = self.directory / "0" / "store.db"
        self.sqlite = self.runner.run(SqliteStore.open(self.path, clock=self.clock))

    def teardown(self) -> None:
        if self.sqlite is not None:
            self.runner.run(self.sqlite.close())
        self.runner.close()
        self.patch.undo()
        shutil.rmtree(self.directory)

    # ---- operations on both stores -------------------------------------------------------

    def both(self, *operations: Operation) -> None:
        self.steps += 1
        self.clock.advance(1)

        async def on(store: Store) -> list[Any]:
            async with asyncio.timeout(20):
                return await asyncio.gather(*(_outcome(item(store)) for item in operations))

        expected, actual = self.runner.run(on(self.memory)), self.runner.run(on(self.sqlite))
        assert actual == expected
        for outcome in expected:
            if isinstance(outcome, Resource):
                self.past.append(outcome)
                self.versions.append(outcome.metadata.resource_version)

    def owners(self, chosen: list[str]) -> tuple[Any, ...]:
        present = self.memory._working.table(SandboxTemplate).objects
        return owned_by(
            *(present[Key("x", name)] for name in chosen if Key("x", name) in present),
            blocks=len(chosen) % 2 == 1,
        )

    def pick(self, data: st.DataObject, kind: type[Any]) -> Any:
        """Return an object that was stored before: current, stale or deleted."""
        choices = [item for item in self.past if isinstance(item, kind)]
        if not choices:
            return None
        # Usually the latest, as otherwise every write would be a conflict.
        position = data.draw(st.integers(0, min(len(choices) - 1, 6)))
        return choices[-1 - position]

    # ---- writes --------------------------------------------------------------------------

    @rule(name=names, held=finalizers, marks=labels, chosen=st.lists(names, max_size=2))
    def create(self, name: str, held: Any, marks: Any, chosen: list[str]) -> None:
        obj = template(
            "x", name, finalizers=held, labels=marks, owner_references=self.owners(chosen)
        )
        self.both(lambda store: store.create(obj))

    @rule(marks=labels)
    def create_with_a_made_name(self, marks: Any) -> None:
        self.both(lambda store: store.create(template("x", generate_name="g-", labels=marks)))

    @rule(name=names)
    def create_another_kind(self, name: str) -> None:
        self.both(lambda store: store.create(lease("x", name, "me")))

    @rule(data=st.data(), image=names, marks=labels, held=finalizers)
    def update(self, data: st.DataObject, image: str, marks: Any, held: Any) -> None:
        if (obj := self.pick(data, SandboxTemplate)) is not None:
            changed = with_meta(with_image(obj, image), labels=marks, finalizers=held)
            self.both(lambda store: store.update(changed))

    @rule(data=st.data(), revision=names)
    def update_status(self, data: st.DataObject, revision: str) -> None:
        if (obj := self.pick(data, SandboxTemplate)) is not None:
            self.both(lambda store: store.update_status(with_revision(obj, revision)))

    @rule(data=st.data(), holder=names)
    def update_another_kind(self, data: st.DataObject, holder: str) -> None:
        if (obj := self.pick(data, Lease)) is not None:
            spec = structs.replace(obj.spec, holder_identity=holder)
            self.both(lambda store: store.update(structs.replace(obj, spec=spec)))

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if (obj := self.pick(data, SandboxTemplate)) is not None:
            self.both(lambda store: store.update(with_meta(obj, finalizers=())))

    @rule(name=names, propagation=propagations)
    def delete(self, name: str, propagation: Propagation) -> None:
        key = Key("x", name)
        self.both(lambda store: store.delete(SandboxTemplate, key, propagation=propagation))

    @rule(data=st.data())
    def delete_what_was_read(self, data: st.DataObject) -> None:
        if (obj := self.pick(data, SandboxTemplate)) is not None:
            meta = obj.metadata
            self.both(
                lambda store: store.delete(
                    SandboxTemplate,
                    obj.key,
                    uid=meta.uid,
                    resource_version=meta.resource_version,
                )
            )

    @rule(data=st.data(), images=st.lists(names, min_size=2, max_size=5), name=names)
    def several_at_once(self, data: st.DataObject, images: list[str], name: str) -> None:
        writes: list[Operation] = [lambda store: store.create(template("x", name))]
        for image in images:
            obj = self.pick(data, SandboxTemplate)
            if obj is not None:
                changed = with_image(obj, image)
                writes.append(lambda store, changed=changed: store.update(changed))
        writes.append(lambda store: store.delete(SandboxTemplate, Key("x", name)))
        self.both(*writes)

    # ---- restarts ------------------------------------------------------------------------

    @rule()
    def restart(self) -> None:
        self.runner.run(self.sqlite.close())
        self.sqlite = self.runner.run(SqliteStore.open(self.path, clock=self.clock))

    @rule()
    def crash(self) -> None:
        """Continue with a copy of the files, as after SIGKILL."""
        self.steps += 1
        left = self.directory / str(self.steps) / "store.db"
        shutil.copytree(self.path.parent, left.parent)
        self.runner.run(self.sqlite.close())
        self.path = left
        self.sqlite = self.runner.run(SqliteStore.open(left, clock=self.clock))

    # ---- reads ---------------------------------------------------------------------------

    @rule(limit=st.integers(1, 3), selector=selectors)
    def list_in_pages(self, limit: int, selector: str | None) -> None:
        chosen = parse_labels(selector) if selector else None

        async def pages(store: Store) -> list[Any]:
            found: list[Any] = []
            token = ""
            while True:
                page = await store.list(
                    SandboxTemplate, labels=chosen, limit=limit, continue_token=token
                )
                found.append(page)
                token = page.continue_token
                if not token:
                    return found

        self.both(pages)

    @rule(data=st.data(), selector=selectors)
    def watch_from_some_version(self, data: st.DataObject, selector: str | None) -> None:
        since = self.versions[-1 - data.draw(st.integers(0, len(self.versions) - 1))]
        chosen = parse_labels(selector) if selector else None
        table = self.memory._working.table(SandboxTemplate)
        count = sum(
            1
            for entry in table._entries
            if entry.version > int(since) and (chosen is None or _is_seen(entry, chosen))
        )

        async def follow(store: Store) -> list[Any]:
            stream = store.watch(SandboxTemplate, since=since, labels=chosen)
            async with aclosing(stream) as events:
                return await take(events, count)

        self.both(follow)

    @invariant()
    def both_hold_the_same(self) -> None:
        if self.sqlite is not None:
            for kind in (SandboxTemplate, Lease):
                expected = self.runner.run(self.memory.list(kind))
                assert self.runner.run(self.sqlite.list(kind)) == expected

    @invariant()
    def nothing_is_left_over(self) -> None:
        if self.sqlite is not None:
            for store in (self.memory, self.sqlite):
                assert not store._working.pending
                _check_owner_index(store)


async def _outcome(work: Awaitable[Any]) -> Any:
    try:
        return await work
    except PaddockError as error:
        return type(error).__name__, error.message


def _is_seen(entry: Any, chosen: Any) -> bool:
    before = entry.old is not None and chosen.matches(entry.old.metadata.labels)
    is_there = str(entry.change) != "DELETED"
    return before or (is_there and chosen.matches(entry.object.metadata.labels))


def _check_owner_index(store: Any) -> None:
    expected = {
        (reference.uid, kind, key)
        for kind in (SandboxTemplate, Lease)
        for key, obj in store._working.table(kind).objects.items()
        for reference in obj.metadata.owner_references
    }
    actual = {
        (uid, kind, key)
        for uid, places in store._working._dependents.items()
        for kind, key in places
    }
    assert actual == expected


TestStores = Stores.TestCase
TestStores.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestStores = pytest.mark.timeout(180)(TestStores)
