"""The embedded stores beyond the contract: bounded history, namespaces, events, chunks."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, aclosing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from paddock.kit.clock import ManualClock
from paddock.kit.errors import (
    ForbiddenError,
    GoneError,
    InvalidError,
    NotFoundError,
    UnavailableError,
)
from paddock.resources.kinds.builtin import Event, Namespace
from paddock.resources.kinds.sandbox import Phase, Sandbox, SandboxSpec, SandboxStatus
from paddock.resources.kinds.template import SandboxTemplate, SandboxTemplateSpec
from paddock.resources.meta import Key, ObjectMeta, OwnerReference, Resource, with_meta
from paddock.resources.selectors import parse_fields
from paddock.store.embedded import MAX_EVENTS, EmbeddedStore
from paddock.store.memory import MemoryStore
from paddock.store.port import Change, Propagation
from paddock.store.sqlite import SqliteStore
from tests.store.objects import (
    PATIENCE_SECONDS,
    changes_since,
    eventually,
    exists,
    lease,
    owned_by,
    take,
    template,
    with_image,
)

Open = Callable[..., Any]


@pytest.fixture(params=["memory", "sqlite"])
async def make(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[Open]:
    """Open an embedded store with the options a test needs."""
    async with AsyncExitStack() as stack:

        async def opened(**options: Any) -> EmbeddedStore:
            if request.param == "memory":
                store = MemoryStore(**options)
            else:
                store = await SqliteStore.open(tmp_path / "store.db", **options)
            stack.push_async_callback(store.close)
            return store

        yield opened


async def test_a_watch_from_a_compacted_version_is_gone(make: Open):
    store = await make(history=4)
    since = (await store.list(SandboxTemplate)).version
    obj = await store.create(template("x", "a"))
    for number in range(20):
        obj = await store.update(with_image(obj, f"i{number}"))
    with pytest.raises(GoneError):
        await changes_since(store, SandboxTemplate, since, 1)
    recent = (await store.list(SandboxTemplate)).version
    await store.delete(SandboxTemplate, obj.key)
    assert await changes_since(store, SandboxTemplate, recent, 1) == [("DELETED", "a")]


async def test_a_slow_watcher_is_gone_and_needs_no_memory(make: Open):
    store = await make(history=4)
    obj = await store.create(template("x", "a"))
    async with aclosing(store.watch(SandboxTemplate)) as stream:
        await take(stream, 1)
        for number in range(50):
            obj = await store.update(with_image(obj, f"i{number}"))
        with pytest.raises(GoneError):
            await take(stream, 50)


async def test_large_objects_have_a_shorter_history(make: Open, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("paddock.store.table.HISTORY_BYTES", 100_000)
    store = await make()
    since = (await store.list(SandboxTemplate)).version
    obj = await store.create(template("x", "a", annotations={"fill": "x" * 10_000}))
    for number in range(80):
        obj = await store.update(with_image(obj, f"i{number}"))
    assert len(store._working.table(SandboxTemplate)._entries) <= 2 * 10
    with pytest.raises(GoneError):
        await changes_since(store, SandboxTemplate, since, 1)


async def test_a_version_newer_than_the_store_is_gone(make: Open):
    store = await make()
    with pytest.raises(GoneError):
        await changes_since(store, SandboxTemplate, "999999", 1)


async def test_a_malformed_version_is_invalid(make: Open):
    store = await make()
    with pytest.raises(InvalidError):
        store.watch(SandboxTemplate, since="yesterday")


async def test_a_continue_token_that_is_too_old_is_gone(make: Open):
    store = await make(history=4)
    for name in "abc":
        await store.create(template("x", name))
    first = await store.list(SandboxTemplate, limit=1)
    obj = first.items[0]
    for number in range(20):
        obj = await store.update(with_image(obj, f"i{number}"))
    with pytest.raises(GoneError):
        await store.list(SandboxTemplate, limit=1, continue_token=first.continue_token)


async def test_a_watch_without_events_gets_bookmarks(make: Open, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("paddock.store.table.BOOKMARK_EVERY", 50)
    monkeypatch.setattr("paddock.store.working_set.BOOKMARK_EVERY", 50)
    store = await make()
    since = (await store.list(SandboxTemplate)).version
    async with aclosing(store.watch(SandboxTemplate, since=since)) as stream:
        waiting = asyncio.ensure_future(anext(stream))
        holder = await store.create(lease("x", "a", "me"))
        for number in range(110):
            spec = structs.replace(holder.spec, holder_identity=f"h{number}")
            holder = await store.update(structs.replace(holder, spec=spec))
        bookmark = await asyncio.wait_for(waiting, PATIENCE_SECONDS)
    assert bookmark.change is Change.BOOKMARK
    assert int(bookmark.version) >= int(since) + 50


async def test_field_selectors_match_default_values(make: Open):
    store = await make()
    spec = SandboxSpec(template=SandboxTemplateSpec(image="base"))
    for name, phase, paused in (("a", Phase.RUNNING, False), ("b", Phase.PENDING, True)):
        sandbox = Sandbox(
            metadata=ObjectMeta(namespace="x", name=name),
            spec=structs.replace(spec, paused=paused),
            status=SandboxStatus(phase=phase),
        )
        await store.create(sandbox, with_status=True)

    async def names(selector: str) -> list[str]:
        listed = await store.list(Sandbox, fields=parse_fields(selector))
        return [item.metadata.name for item in listed.items]

    assert await names("status.phase=Pending") == ["b"]
    assert await names("status.phase!=Pending") == ["a"]
    assert await names("spec.paused=true") == ["b"]
    assert await names("spec.template.image=base,status.phase=Running") == ["a"]
    assert await names("spec.restoreFrom=") == ["a", "b"]
    assert await names("spec.noSuchField=x") == []


async def test_thousands_of_dependents_are_deleted_with_their_owner(make: Open):
    store = await make()
    owner = await store.create(template("x", "owner"))
    references = owned_by(owner, blocks=True)
    await asyncio.gather(
        *(
            store.create(template("x", f"n{number}", owner_references=references))
            for number in range(1300)
        )
    )
    await store.delete(SandboxTemplate, owner.key, propagation=Propagation.FOREGROUND)

    async def all_gone() -> bool:
        return not (await store.list(SandboxTemplate)).items

    await eventually(all_gone)


async def test_an_owner_of_an_unknown_kind_counts_as_present(make: Open):
    store = await make()
    elsewhere = OwnerReference(api_version="apps/v1", kind="Deployment", name="d", uid="u-1")
    child = await store.create(template("x", "child", owner_references=(elsewhere,)))
    here = await store.create(template("x", "owner"))
    child = await store.update(with_meta(child, owner_references=(elsewhere, *owned_by(here))))
    await store.delete(SandboxTemplate, here.key)
    kept = await store.get(SandboxTemplate, child.key)
    assert [item.name for item in kept.metadata.owner_references] == ["d"]


async def test_removing_an_owner_reference_releases_a_waiting_owner(make: Open):
    store = await make()
    owner = await store.create(template("x", "owner"))
    child = await store.create(
        template(
            "x",
            "child",
            finalizers=("x.dev/hold",),
            owner_references=owned_by(owner, blocks=True),
        )
    )
    await store.delete(SandboxTemplate, owner.key, propagation=Propagation.FOREGROUND)
    child = await store.get(SandboxTemplate, child.key)
    await store.update(with_meta(child, owner_references=()))
    assert not await exists(store, SandboxTemplate, owner.key)


async def test_the_store_does_not_share_mappings_with_the_caller(make: Open):
    store = await make()
    labels = {"app": "web"}
    made = await store.create(template("x", "a", labels=labels))
    labels["app"] = "changed behind the store's back"
    assert made.metadata.labels == {"app": "web"}
    assert (await store.get(SandboxTemplate, made.key)).metadata.labels == {"app": "web"}


async def test_a_value_of_the_wrong_type_is_rejected(make: Open):
    store = await make()
    wrong: Any = {"app": 5}
    with pytest.raises(InvalidError):
        await store.create(template("x", "a", annotations=wrong))
    assert not await exists(store, SandboxTemplate, Key("x", "a"))


async def test_namespaced_objects_require_a_namespace_and_others_reject_it(make: Open):
    store = await make()
    for obj in (template("", "a"), Namespace(metadata=ObjectMeta(name="n", namespace="x"))):
        with pytest.raises(InvalidError) as caught:
            await store.create(obj)
        assert caught.value.problems[0].path == "metadata.namespace"


async def test_a_kind_that_the_store_does_not_hold_is_rejected(make: Open):
    class Stranger(Resource, frozen=True, kw_only=True):
        KIND = "Stranger"

    store = await make()
    with pytest.raises(InvalidError, match="Stranger"):
        await store.get(Stranger, Key("x", "a"))


async def test_creating_in_a_missing_namespace_fails_if_namespaces_are_enforced(make: Open):
    store = await make(enforce_namespaces=True)
    with pytest.raises(NotFoundError, match="team-a"):
        await store.create(template("team-a", "a"))
    await store.create(template("default", "a"))
    await store.create(template("paddock-system", "a"))
    namespace = await store.create(Namespace(metadata=ObjectMeta(name="team-a")))
    await store.create(template("team-a", "a", finalizers=("x.dev/hold",)))
    assert namespace.status.phase == "Active"


async def test_a_namespace_is_deleted_with_its_contents(make: Open):
    store = await make(enforce_namespaces=True)
    await store.create(Namespace(metadata=ObjectMeta(name="team-a")))
    await store.create(template("team-a", "free"))
    held = await store.create(template("team-a", "held", finalizers=("x.dev/hold",)))
    other = await store.create(template("default", "other"))

    ending = await store.delete(Namespace, Key("", "team-a"))

    assert ending.is_deleting
    assert ending.status.phase == "Terminating"
    assert not await exists(store, SandboxTemplate, Key("team-a", "free"))
    with pytest.raises(ForbiddenError):
        await store.create(template("team-a", "late"))
    held = await store.get(SandboxTemplate, held.key)
    assert held.is_deleting
    await store.update(with_meta(held, finalizers=()))
    assert not await exists(store, Namespace, Key("", "team-a"))
    assert await exists(store, SandboxTemplate, other.key)


async def test_default_namespaces_cannot_be_deleted(make: Open):
    store = await make(enforce_namespaces=True)
    listed = await store.list(Namespace)
    assert [item.metadata.name for item in listed.items] == ["default", "paddock-system"]
    with pytest.raises(ForbiddenError):
        await store.delete(Namespace, Key("", "default"))


async def test_expired_events_are_deleted(make: Open):
    clock = ManualClock()
    store = await make(clock=clock)
    for minutes in (0, 30, 61, 90):
        event = Event(
            metadata=ObjectMeta(namespace="x", name=f"e{minutes}"),
            last_timestamp=clock.now() - timedelta(minutes=minutes),
        )
        await store.create(event)
    assert await store.sweep(clock.now()) == 2
    names = [item.metadata.name for item in (await store.list(Event)).items]
    assert names == ["e0", "e30"]
    clock.advance(3600)
    assert await store.sweep() == 2


async def test_the_number_of_events_is_limited(make: Open, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("paddock.store.embedded.MAX_EVENTS", 5)
    assert MAX_EVENTS == 10_000
    clock = ManualClock(datetime(2030, 1, 1, tzinfo=UTC))
    store = await make(clock=clock)
    for number in range(8):
        clock.advance(1)
        await store.create(
            Event(metadata=ObjectMeta(namespace="x", name=f"e{number}"), last_timestamp=clock.now())
        )
    assert await store.sweep() == 3
    names = [item.metadata.name for item in (await store.list(Event)).items]
    assert names == ["e3", "e4", "e5", "e6", "e7"]


async def test_a_closed_store_ends_its_watches_and_rejects_writes(make: Open):
    store = await make()
    stream = store.watch(SandboxTemplate)
    waiting = asyncio.ensure_future(_drain(stream))
    await asyncio.sleep(0)
    await store.close()
    assert [event.change for event in await asyncio.wait_for(waiting, PATIENCE_SECONDS)] == [
        Change.BOOKMARK
    ]
    with pytest.raises(UnavailableError):
        await store.create(template("x", "a"))
    await store.close()


async def _drain(stream: Any) -> list[Any]:
    return [event async for event in stream]
