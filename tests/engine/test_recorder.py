"""Events are counted, bounded and written in the background."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from paddock.engine.recorder import Recorder
from paddock.kit.clock import LoopClock
from paddock.kit.errors import UnavailableError
from paddock.kit.tasks import background
from paddock.resources.kinds.builtin import Event, Namespace, Secret
from paddock.resources.meta import Key, ObjectMeta
from tests.engine.faults import FaultyStore

pytestmark = pytest.mark.looptime

SUBJECT = Secret(metadata=ObjectMeta(name="thing", namespace="default", uid="u-1"))


@asynccontextmanager
async def recording(store: FaultyStore, **options: Any) -> AsyncIterator[Recorder]:
    recorder = Recorder(store, "tester", clock=LoopClock(), **options)
    async with background(recorder.run(), name="recorder"):
        yield recorder


async def events(store: FaultyStore) -> list[Event]:
    return list((await store.list(Event)).items)


async def test_an_event_is_attached_to_its_object(store: FaultyStore) -> None:
    async with recording(store) as recorder:
        recorder.warning(SUBJECT, "Broken", "it broke because of this")
        await asyncio.sleep(1)
    (event,) = await events(store)
    assert event.involved_object.kind == "Secret"
    assert event.involved_object.name == "thing"
    assert event.involved_object.uid == "u-1"
    assert (event.type, event.reason) == ("Warning", "Broken")
    assert event.message == "it broke because of this"
    assert (event.count, event.source.component) == (1, "tester")
    assert event.metadata.namespace == "default"
    assert event.first_timestamp is not None


async def test_repeated_events_are_counted_and_written_in_batches(
    store: FaultyStore,
) -> None:
    before = await store.create(SUBJECT)
    async with recording(store) as recorder:
        for _ in range(100):
            recorder.normal(SUBJECT, "Scaled", "one more")
            await asyncio.sleep(0.1)
        await asyncio.sleep(10)
    (event,) = await events(store)
    assert event.count == 100
    writes = int(event.metadata.resource_version) - int(before.metadata.resource_version)
    assert writes <= 4, "ten seconds at one write per five"
    assert event.last_timestamp > event.first_timestamp


async def test_the_count_continues_after_a_restart(store: FaultyStore) -> None:
    for _ in range(3):
        async with recording(store) as recorder:
            recorder.normal(SUBJECT, "Started", "here we go")
            await asyncio.sleep(1)
    (event,) = await events(store)
    assert event.count == 3


async def test_the_count_restarts_if_the_event_was_deleted(store: FaultyStore) -> None:
    async with recording(store) as recorder:
        recorder.normal(SUBJECT, "Scaled", "one more")
        await asyncio.sleep(10)
        (event,) = await events(store)
        await store.delete(Event, event.key)
        recorder.normal(SUBJECT, "Scaled", "one more")
        await asyncio.sleep(10)
    (event,) = await events(store)
    assert event.count == 1


async def test_events_of_one_object_are_rate_limited(
    store: FaultyStore,
) -> None:
    async with recording(store, burst=5, refill_seconds=60) as recorder:
        for number in range(50):
            recorder.normal(SUBJECT, "Chatter", f"message {number}")
        await asyncio.sleep(1)
        assert len(await events(store)) == 5
        await asyncio.sleep(120)
        recorder.normal(SUBJECT, "Chatter", "later")
        await asyncio.sleep(1)
        assert len(await events(store)) == 6


async def test_memory_is_bounded_while_the_store_is_unavailable(store: FaultyStore) -> None:
    recorder = Recorder(store, "tester", clock=LoopClock(), capacity=10)
    for number in range(1000):
        subject = Secret(
            metadata=ObjectMeta(name=f"s{number}", namespace="default", uid=f"{number}")
        )
        recorder.normal(subject, "Made", "it was made")
    assert len(recorder._entries) == 10
    assert len(recorder._buckets) <= 10


async def test_a_failed_write_is_retried_and_then_logged(
    store: FaultyStore, caplog: pytest.LogCaptureFixture
) -> None:
    async def refuse(obj: Any, **kwargs: Any) -> Any:
        raise UnavailableError("full disk")

    works = store.inner.create
    store.create = refuse  # type: ignore[attr-defined]
    async with recording(store) as recorder:
        recorder.normal(SUBJECT, "Lost", "nobody reads this")
        await asyncio.sleep(60)
        assert "event not written" in caplog.text
        store.create = works  # type: ignore[attr-defined]
        recorder.normal(SUBJECT, "Kept", "somebody reads this")
        await asyncio.sleep(1)
    assert [event.reason for event in await events(store)] == ["Kept"]


async def test_a_short_outage_loses_nothing(store: FaultyStore) -> None:
    calls = 0
    works = store.inner.create

    async def flaky(obj: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls < 3:
            raise UnavailableError("a moment")
        return await works(obj, **kwargs)

    store.create = flaky  # type: ignore[attr-defined]
    async with recording(store) as recorder:
        recorder.normal(SUBJECT, "Kept", "somebody reads this")
        await asyncio.sleep(10)
    assert [event.count for event in await events(store)] == [1]


async def test_events_of_cluster_scoped_objects_are_in_the_default_namespace(
    store: FaultyStore,
) -> None:
    async with recording(store) as recorder:
        recorder.normal(Namespace(metadata=ObjectMeta(name="blue", uid="n")), "Made", "a team")
        await asyncio.sleep(1)
    (event,) = await events(store)
    assert event.metadata.namespace == "default"
    assert event.involved_object.namespace == ""
    assert await store.get(Event, Key("default", event.metadata.name)) == event
