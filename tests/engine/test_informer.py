"""Informers: up to date, never reverting, missing no deletion."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec import structs

from paddock.engine.informer import Filter, Informer
from paddock.kit.clock import LoopClock
from paddock.kit.errors import (
    ForbiddenError,
    GoneError,
    InvalidError,
    NotFoundError,
    UnavailableError,
)
from paddock.kit.tasks import background
from paddock.resources.kinds.builtin import Secret
from paddock.resources.meta import Key, ObjectMeta, with_meta
from paddock.resources.selectors import parse_labels
from tests.engine.faults import FaultyStore

pytestmark = pytest.mark.looptime


def secret(name: str, *, namespace: str = "default", **fields: Any) -> Secret:
    meta = {k: fields.pop(k) for k in ("labels", "finalizers") if k in fields}
    return Secret(metadata=ObjectMeta(name=name, namespace=namespace, **meta), **fields)


def key(name: str) -> Key:
    return Key("default", name)


def by_type(obj: Secret) -> tuple[str, ...]:
    return (obj.type,)


class Ear:
    """Records all changes that an informer reports, and checks that they are consistent."""

    def __init__(self, informer: Informer[Secret]) -> None:
        self.heard: list[tuple[Secret | None, Secret | None]] = []
        self.world: dict[Key, Secret] = {}
        informer.subscribe(self.hear)

    def hear(self, old: Secret | None, new: Secret | None) -> None:
        self.heard.append((old, new))
        obj = new or old
        assert obj is not None
        assert self.world.get(obj.key) is old, "old is what was heard last"
        if new is None:
            del self.world[obj.key]
        else:
            if old is not None:
                assert int(new.metadata.resource_version) > int(old.metadata.resource_version)
                assert new.metadata.uid == old.metadata.uid, "a namesake comes as a new object"
            self.world[obj.key] = new

    @property
    def names(self) -> list[tuple[str | None, str | None]]:
        return [(o and o.metadata.name, n and n.metadata.name) for o, n in self.heard]


@asynccontextmanager
async def running(store: FaultyStore, **options: Any) -> AsyncIterator[Informer[Secret]]:
    informer = Informer(store, Secret, clock=LoopClock(), indexes={"type": by_type}, **options)
    async with background(informer.run(), name="informer"):
        await informer.wait_synced()
        yield informer


async def settle() -> None:
    await asyncio.sleep(0.001)


async def test_it_is_synced_when_all_pages_are_read(store: FaultyStore) -> None:
    for number in range(25):
        await store.create(secret(f"s{number}"))
    async with running(store, page_size=10) as informer:
        assert len(informer) == 25
        assert store.lists == 3
        assert informer.is_synced


async def test_it_applies_creations_changes_and_deletions(store: FaultyStore) -> None:
    async with running(store) as informer:
        ear = Ear(informer)
        created = await store.create(secret("a", type="x"))
        await settle()
        assert informer.get(key("a")) == created
        changed = await store.update(structs.replace(created, type="y"))
        await settle()
        assert informer.get(key("a")) == changed
        await store.delete(Secret, key("a"))
        await settle()
        assert informer.get(key("a")) is None
        assert ear.names == [(None, "a"), ("a", "a"), ("a", None)]


async def test_indexes_follow_changes(store: FaultyStore) -> None:
    one = await store.create(secret("a", type="x"))
    async with running(store) as informer:
        await store.create(secret("b", type="x"))
        await settle()
        assert [o.metadata.name for o in informer.by_index("type", "x")] == ["a", "b"]
        await store.update(structs.replace(one, type="y"))
        await settle()
        assert [o.metadata.name for o in informer.by_index("type", "x")] == ["b"]
        assert len(informer.view("type", "y")) == 1
        await store.delete(Secret, key("b"))
        await settle()
        assert informer.by_index("type", "x") == ()
        assert set(informer.index_values("type")) == {"y"}, "no empty buckets stay behind"


async def test_an_unknown_index_is_an_error_that_names_the_known_ones(store: FaultyStore) -> None:
    async with running(store) as informer:
        with pytest.raises(InvalidError, match=r"no index 'nope'; known indexes: type"):
            informer.by_index("nope", 1)


async def test_a_late_subscriber_first_gets_the_existing_objects(store: FaultyStore) -> None:
    await store.create(secret("a"))
    async with running(store) as informer:
        ear = Ear(informer)
        assert ear.names == [(None, "a")]


async def test_an_unsubscribed_handler_is_not_called(store: FaultyStore) -> None:
    async with running(store) as informer:
        heard: list[Any] = []
        leave = informer.subscribe(lambda old, new: heard.append(new))
        leave()
        await store.create(secret("a"))
        await settle()
        assert heard == []


async def test_a_handler_that_raises_does_not_affect_others(
    store: FaultyStore, caplog: pytest.LogCaptureFixture
) -> None:
    def bad(old: Secret | None, new: Secret | None) -> None:
        raise ValueError("bad handler")

    async with running(store) as informer:
        informer.subscribe(bad)
        ear = Ear(informer)
        await store.create(secret("a"))
        await settle()
        assert ear.names == [(None, "a")]
        assert "informer handler failed" in caplog.text


async def test_a_watch_that_ends_is_resumed(store: FaultyStore) -> None:
    async with running(store) as informer:
        ear = Ear(informer)
        await store.create(secret("a"))
        await settle()
        store.break_watches()
        await store.create(secret("b"))
        await asyncio.sleep(1)
        assert set(ear.world) == {key("a"), key("b")}
        assert store.lists == 1
        assert informer.is_healthy(), "an ordinary end is no problem"


async def test_a_watch_that_replays_old_events_changes_nothing(store: FaultyStore) -> None:
    async with running(store) as informer:
        ear = Ear(informer)
        start = (await store.list(Secret)).version
        await store.create(secret("gone"))
        await store.create(secret("kept"))
        await store.delete(Secret, key("gone"))
        await settle()
        heard = len(ear.heard)
        real = store.inner.watch
        store.inner.watch = lambda kind, **kwargs: real(kind, **{**kwargs, "since": start})
        store.break_watches()
        await asyncio.sleep(1)
        assert len(ear.heard) == heard, "not even for a moment does the dead one come back"
        await store.create(secret("new"))
        await settle()
        assert set(ear.world) == {key("kept"), key("new")}


async def test_watch_errors_are_retried_with_backoff(store: FaultyStore, looptime: Any) -> None:
    async with running(store) as informer:
        ear = Ear(informer)
        await settle()
        store.watch_errors = [UnavailableError("no") for _ in range(6)]
        store.break_watches(ConnectionResetError("cut"))
        await settle()
        await store.create(secret("a"))
        assert not informer.is_healthy()
        while not ear.world:
            await asyncio.sleep(0.01)
        assert 3.0 < looptime < 12.0, "seven failures: 50 ms doubling, with jitter"
        assert store.lists == 1, "nothing was forgotten, so nothing is listed anew"
        assert informer.last_failure is not None
        await asyncio.sleep(31)
        assert informer.is_healthy()


async def test_deletions_in_a_gap_are_delivered_after_gone(store: FaultyStore) -> None:
    for name in ("kept", "deleted", "replaced", "changed"):
        await store.create(secret(name, type="old"))
    async with running(store) as informer:
        ear = Ear(informer)
        await settle()
        store.watch_errors = [GoneError("compacted")]
        store.break_watches(ConnectionResetError("cut"))
        await settle()
        await store.delete(Secret, key("deleted"))
        await store.delete(Secret, key("replaced"))
        await store.create(secret("replaced", type="new"))
        changed = await store.get(Secret, key("changed"))
        await store.update(structs.replace(changed, type="new"))
        ear.heard.clear()
        await asyncio.sleep(2)
        assert store.lists == 2
        assert set(ear.world) == {key("kept"), key("replaced"), key("changed")}
        assert sorted(ear.names, key=str) == [
            ("changed", "changed"),
            ("deleted", None),
            ("replaced", None),
            (None, "replaced"),
        ]
        assert len(informer.view("type", "new")) == 2


async def test_a_list_older_than_the_cache_is_rejected_and_repeated(
    store: FaultyStore,
) -> None:
    await store.create(secret("kept"))
    stale = await store.list(Secret)
    await store.create(secret("deleted"))
    older = await store.list(Secret)
    async with running(store) as informer:
        Ear(informer)
        await store.delete(Secret, key("deleted"))
        await settle()
        answers = [stale, older]
        real = store.inner.list

        async def lagging(*args: Any, **kwargs: Any) -> Any:
            return answers.pop(0) if answers else await real(*args, **kwargs)

        store.inner.list = lagging
        store.watch_errors = [GoneError("compacted")]
        store.break_watches()
        await settle()
        for _ in range(50):
            assert informer.get(key("kept")) is not None
            assert informer.get(key("deleted")) is None, "it must not come back"
            await asyncio.sleep(0.1)
        assert answers == []
        await store.create(secret("new"))
        await settle()
        assert informer.get(key("new")) is not None


async def test_a_store_that_is_always_behind_is_listed_with_backoff(
    store: FaultyStore,
) -> None:
    async with running(store):
        await settle()
        store.watch_errors = [GoneError("compacted")] * 100
        store.break_watches(GoneError("compacted"))
        await asyncio.sleep(10)
        assert store.lists < 15


async def test_a_watch_that_always_ends_at_once_is_opened_with_backoff(
    store: FaultyStore,
) -> None:
    async with running(store):
        await settle()
        for _ in range(100):
            store.break_watches()
            await asyncio.sleep(0.1)
        assert store.watches < 20


async def test_a_forbidden_first_list_is_fatal(store: FaultyStore) -> None:
    store.list_errors = [ForbiddenError("may not list secrets")]
    informer = Informer(store, Secret, clock=LoopClock())
    with pytest.raises(ForbiddenError, match="may not list secrets"):
        await informer.run()


async def test_an_unavailable_store_is_retried(store: FaultyStore) -> None:
    await store.create(secret("a"))
    store.list_errors = [UnavailableError("starting") for _ in range(5)]
    async with running(store) as informer:
        assert len(informer) == 1
        assert not informer.is_healthy(), "it went wrong a moment ago"


async def test_after_the_first_sync_forbidden_is_not_fatal(store: FaultyStore) -> None:
    async with running(store) as informer:
        await settle()
        store.watch_errors = [ForbiddenError("rights are being rotated")]
        store.break_watches()
        await store.create(secret("a"))
        await asyncio.sleep(5)
        assert len(informer) == 1


async def test_an_object_that_leaves_the_filter_is_deleted(store: FaultyStore) -> None:
    only = Filter(namespace="default", labels=parse_labels("app=web"))
    web = await store.create(secret("web", labels={"app": "web"}))
    await store.create(secret("db", labels={"app": "db"}))
    await store.create(secret("other", namespace="else", labels={"app": "web"}))
    async with running(store, only=only) as informer:
        assert [o.metadata.name for o in informer.all()] == ["web"]
        await store.update(with_meta(web, labels={"app": "db"}))
        await settle()
        assert informer.all() == ()


async def test_objects_are_cached_transformed(store: FaultyStore) -> None:
    def slim(obj: Secret) -> Secret:
        return structs.replace(obj, data={})

    await store.create(secret("a", data={"k": "YmlnIQ=="}))
    async with running(store, transform=slim) as informer:
        await store.create(secret("b", data={"k": "YmlnIQ=="}))
        await settle()
        informer.observe(await store.create(secret("c", data={"k": "YmlnIQ=="})))
        assert [dict(o.data) for o in informer.all()] == [{}, {}, {}]


# ---- read your writes --------------------------------------------------------------------


async def test_an_observed_write_is_visible_at_once_and_notified_once(store: FaultyStore) -> None:
    store.delay = lambda: 5.0
    async with running(store) as informer:
        ear = Ear(informer)
        created = await store.create(secret("a"))
        informer.observe(created)
        assert informer.get(key("a")) is created
        await asyncio.sleep(20)
        assert ear.names == [(None, "a")]


async def test_a_late_event_does_not_revert_an_observed_write(
    store: FaultyStore,
) -> None:
    store.delay = lambda: 5.0
    async with running(store) as informer:
        ear = Ear(informer)
        first = await store.create(secret("a", type="1"))
        second = await store.update(structs.replace(first, type="2"))
        informer.observe(second)
        for _ in range(20):
            assert informer.get(key("a")) is second
            await asyncio.sleep(1)
        assert ear.names == [(None, "a")]


async def test_late_events_do_not_restore_a_deleted_object(
    store: FaultyStore,
) -> None:
    store.delay = lambda: 5.0
    async with running(store) as informer:
        Ear(informer)
        created = await store.create(secret("a"))
        informer.observe(created)
        informer.observe_deleted(await store.delete(Secret, key("a")))
        for _ in range(20):
            assert informer.get(key("a")) is None
            await asyncio.sleep(1)
        assert len(informer._tombstones) == 0


async def test_an_object_recreated_after_a_deletion_is_cached(store: FaultyStore) -> None:
    store.delay = lambda: 1.0
    async with running(store) as informer:
        Ear(informer)
        first = await store.create(secret("a"))
        informer.observe(first)
        informer.observe_deleted(await store.delete(Secret, key("a")))
        second = await store.create(secret("a"))
        informer.observe(second)
        for _ in range(10):
            assert informer.get(key("a")) is second
            await asyncio.sleep(1)


async def test_removing_the_last_finalizer_of_a_deleting_object_deletes_it(
    store: FaultyStore,
) -> None:
    store.delay = lambda: 5.0
    async with running(store) as informer:
        Ear(informer)
        created = await store.create(secret("a", finalizers=("x/y",)))
        informer.observe(created)
        dying = await store.delete(Secret, key("a"))
        informer.observe(dying)
        assert informer.get(key("a")) is dying
        informer.observe(await store.update(with_meta(dying, finalizers=())))
        for _ in range(25):
            assert informer.get(key("a")) is None
            await asyncio.sleep(1)


async def test_a_deletion_returned_with_an_older_version_is_applied_at_once(
    store: FaultyStore,
) -> None:
    """API servers do this; the watch may have delivered newer objects already."""
    async with running(store) as informer:
        Ear(informer)
        await store.create(secret("a", finalizers=("x/y",)))
        dying = await store.delete(Secret, key("a"))
        await store.create(secret("b"))
        await settle()
        store.delay = lambda: 5.0
        await store.update(with_meta(dying, finalizers=()))
        informer.observe(with_meta(dying, finalizers=()))
        for _ in range(25):
            assert informer.get(key("a")) is None
            await asyncio.sleep(1)
        assert len(informer._tombstones) == 0


async def test_observing_a_write_after_the_deletion_event_does_not_restore_the_object(
    store: FaultyStore,
) -> None:
    async with running(store) as informer:
        created = await store.create(secret("a"))
        await store.delete(Secret, key("a"))
        await settle()
        informer.observe(created)
        assert informer.get(key("a")) is None


async def test_a_write_that_removes_an_object_from_the_filter_is_applied_at_once(
    store: FaultyStore,
) -> None:
    store.delay = lambda: 2.0
    async with running(store, only=Filter(labels=parse_labels("app=web"))) as informer:
        Ear(informer)
        web = await store.create(secret("a", labels={"app": "web"}))
        informer.observe(web)
        out = await store.update(with_meta(web, labels={"app": "db"}))
        informer.observe(out)
        for _ in range(10):
            assert informer.get(key("a")) is None
            await asyncio.sleep(1)
        back = await store.update(with_meta(out, labels={"app": "web"}))
        informer.observe(back)
        assert informer.get(key("a")) is back


async def test_a_list_in_flight_does_not_revert_a_write(store: FaultyStore) -> None:
    for number in range(30):
        await store.create(secret(f"s{number:02}"))
    async with running(store, page_size=1) as informer:
        ear = Ear(informer)
        await settle()
        store.watch_errors = [GoneError("compacted")]
        store.break_watches()
        store.list_seconds = 0.1
        while store.lists < 30 + 10:
            await asyncio.sleep(0.01)
        informer.observe(await store.create(secret("a-new-one")))
        informer.observe_deleted(await store.delete(Secret, key("s29")))
        await asyncio.sleep(5)
        assert informer.get(key("a-new-one")) is not None
        assert informer.get(key("s29")) is None
        assert len(informer) == 30
        assert ear.names.count((None, "a-new-one")) == 1
        assert ("a-new-one", None) not in ear.names, "not even for a moment was it gone"


# ---- random faults -----------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
async def test_under_random_faults_it_converges_to_the_store(store: FaultyStore, seed: int) -> None:
    chance = random.Random(seed)
    store.delay = lambda: chance.choice((0.0, 0.0, 0.05, 0.5))
    store.copies = lambda: chance.choice((1, 1, 1, 2, 3))
    async with running(store, page_size=3) as informer:
        ear = Ear(informer)
        for step in range(300):
            await write_something(store, informer, chance, step)
            break_something(store, chance)
            if chance.random() < 0.5:
                await asyncio.sleep(chance.choice((0.0, 0.01, 0.3)))
        store.delay = lambda: 0.0
        await asyncio.sleep(300)
        truth = {obj.key: obj for obj in (await store.inner.list(Secret)).items}
        assert {o.key: o for o in informer.all()} == truth
        assert ear.world == truth
        for kind in "012":
            expected = {k for k, o in truth.items() if o.type == kind}
            assert {o.key for o in informer.by_index("type", kind)} == expected
        assert len(informer._tombstones) == 0


async def write_something(
    store: FaultyStore, informer: Informer[Secret], chance: random.Random, step: int
) -> None:
    """Create, change or delete an object; half of the writes are observed."""
    name, is_own = key(f"s{chance.randrange(8)}"), chance.random() < 0.5
    try:
        current = await store.get(Secret, name)
    except NotFoundError:
        obj = await store.create(secret(name.name, type=str(step % 3)))
    else:
        if chance.random() < 0.3:
            gone = await store.delete(Secret, name)
            if is_own:
                informer.observe_deleted(gone)
                assert informer.get(name) is None
            return
        obj = await store.update(structs.replace(current, type=f"{step % 3}"))
    if is_own:
        informer.observe(obj)
        seen = informer.get(name)
        assert seen is not None
        assert int(seen.metadata.resource_version) >= int(obj.metadata.resource_version)


def break_something(store: FaultyStore, chance: random.Random) -> None:
    fault = chance.random()
    if fault < 0.05:
        store.break_watches(ConnectionResetError("cut"))
    elif fault < 0.1:
        store.watch_errors = [GoneError("compacted")]
        store.break_watches()
    elif fault < 0.15:
        store.list_errors = [UnavailableError("busy")]
