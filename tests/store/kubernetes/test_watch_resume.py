"""A watch over consecutive connections is resumed, and fails only if that is impossible."""

import asyncio
from contextlib import aclosing
from typing import Any

import pytest
from aiohttp import web

from paddock.kit.errors import ForbiddenError, GoneError
from paddock.resources.kinds.sandbox import Phase, Sandbox
from paddock.resources.selectors import parse_fields, parse_labels
from paddock.store.kubernetes import KubernetesStore
from paddock.store.port import Change
from tests.store.kubernetes.scripted import (
    bookmark,
    event,
    gives,
    refuses,
    sandbox,
    scripted_server,
    status,
    streams,
)


async def take(
    store: KubernetesStore, count: int, since: str | None = "1", **how: Any
) -> list[tuple[str, str, str]]:
    """Return this many events as change, name and version."""
    seen: list[tuple[str, str, str]] = []
    async with aclosing(store.watch(Sandbox, since=since, **how)) as events:
        async for item in events:
            seen.append(
                (item.change, item.object.metadata.name if item.object else "", item.version)
            )
            if len(seen) == count:
                break
    return seen


def versions_asked(server: Any) -> list[str]:
    return [request.query["resourceVersion"] for request in server.asked]


async def test_a_stream_that_ends_is_resumed_from_the_last_version_seen() -> None:
    first = streams(event("ADDED", sandbox("a", 5)))
    second = streams(event("MODIFIED", sandbox("a", 6)))
    async with scripted_server(first, second) as server:
        store = server.store()
        seen = await take(store, 2)
        await store.close()
    assert seen == [("ADDED", "a", "5"), ("MODIFIED", "a", "6")]
    assert versions_asked(server) == ["1", "5"]


async def test_a_connection_that_breaks_within_an_event_loses_nothing() -> None:
    whole, half = event("ADDED", sandbox("a", 5)), event("ADDED", sandbox("b", 6))
    first = streams(whole, half[:40], cut=True)
    async with scripted_server(first, streams(half)) as server:
        store = server.store()
        seen = await take(store, 2)
        await store.close()
    assert [name for _, name, _ in seen] == ["a", "b"]
    assert versions_asked(server) == ["1", "5"]


async def test_a_bookmark_updates_the_version_to_resume_from() -> None:
    async with scripted_server(streams(bookmark(90)), streams(bookmark(91))) as server:
        store = server.store()
        assert await take(store, 2) == [("BOOKMARK", "", "90"), ("BOOKMARK", "", "91")]
        await store.close()
    assert versions_asked(server) == ["1", "90"]


@pytest.mark.parametrize(
    "answer",
    [
        refuses(410, "Expired", "too old resource version"),
        streams(event("ERROR", status(410, "Expired", "too old resource version"))),
    ],
    ids=["as the answer", "inside the stream"],
)
async def test_a_watch_of_a_compacted_version_is_gone(answer: Any) -> None:
    async with scripted_server(answer) as server:
        store = server.store()
        with pytest.raises(GoneError, match="too old"):
            await take(store, 1)
        await store.close()


async def test_a_watch_retries_a_busy_or_failing_server() -> None:
    answers = (
        refuses(429, "TooManyRequests", **{"Retry-After": "0"}),
        refuses(503, "ServiceUnavailable"),
        streams(event("ADDED", sandbox("a", 2))),
    )
    async with scripted_server(*answers) as server:
        store = server.store()
        assert await take(store, 1) == [("ADDED", "a", "2")]
        await store.close()
    assert versions_asked(server) == ["1", "1", "1"]


async def test_a_forbidden_watch_is_not_retried() -> None:
    async with scripted_server(refuses(403, "Forbidden")) as server:
        store = server.store()
        with pytest.raises(ForbiddenError):
            await take(store, 1)
        await store.close()
    assert len(server.asked) == 1


async def test_a_silent_connection_is_replaced() -> None:
    async def silence(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await asyncio.sleep(30)
        return response

    async with scripted_server(silence, streams(event("ADDED", sandbox("a", 2)))) as server:
        store = server.store(watch_silence_seconds=1.0)
        assert await take(store, 1) == [("ADDED", "a", "2")]
        await store.close()


async def test_a_watch_without_a_version_lists_first() -> None:
    page = {"metadata": {"resourceVersion": "8"}, "items": [sandbox("a", 3), sandbox("b", 4)]}
    async with scripted_server(gives(page), streams(event("DELETED", sandbox("a", 9)))) as server:
        store = server.store()
        seen = await take(store, 4, since=None)
        await store.close()
    assert seen == [
        ("ADDED", "a", "3"),
        ("ADDED", "b", "4"),
        ("BOOKMARK", "", "8"),
        ("DELETED", "a", "9"),
    ]
    assert server.asked[1].query["resourceVersion"] == "8"


async def test_an_object_that_cannot_be_decoded_is_skipped() -> None:
    bad = sandbox("bad", 5)
    bad["spec"] = {"paused": "perhaps"}
    chunks = (event("ADDED", bad), event("ADDED", sandbox("good", 6)), event("DELETED", bad))
    async with scripted_server(streams(*chunks)) as server:
        store = server.store()
        assert await take(store, 2) == [("ADDED", "good", "6"), ("DELETED", "bad", "5")]
        await store.close()


async def test_a_field_that_the_server_does_not_support_is_selected_by_the_client() -> None:
    refusal = refuses(400, "BadRequest", "field label not supported: spec.paused")
    paused, running = sandbox("a", 5), sandbox("a", 6)
    paused["spec"] = {"paused": True}
    chunks = (
        event("ADDED", sandbox("other", 4)),
        event("MODIFIED", paused),
        event("MODIFIED", running),
        event("MODIFIED", sandbox("a", 7)),
    )
    async with scripted_server(refusal, streams(*chunks)) as server:
        store = server.store()
        seen = await take(store, 4, fields=parse_fields("spec.paused=true"))
        await store.close()
    assert [(change, name) for change, name, _ in seen if change != "BOOKMARK"] == [
        ("MODIFIED", "a"),
        ("DELETED", "a"),
    ]
    assert [request.query.get("fieldSelector") for request in server.asked] == [
        "spec.paused=true",
        None,
    ]


async def test_a_field_with_a_default_is_selected_by_the_client() -> None:
    pending = sandbox("a", 5)
    running = sandbox("b", 6, phase="Running")
    page = {"metadata": {"resourceVersion": "8"}, "items": [pending, running]}
    async with scripted_server(gives(page), gives(page)) as server:
        store = server.store()
        found = await store.list(Sandbox, fields=parse_fields("status.phase=Pending"))
        await store.list(Sandbox, fields=parse_fields("status.phase=Running"))
        await store.close()
    assert [item.metadata.name for item in found.items] == ["a"]
    assert found.items[0].status.phase is Phase.PENDING
    assert [request.query.get("fieldSelector") for request in server.asked] == [
        None,
        "status.phase=Running",
    ]


async def test_selectors_and_namespace_are_sent_to_the_server() -> None:
    async with scripted_server(streams(bookmark(2))) as server:
        store = server.store()
        labels = parse_labels("app in (a,b),!gone")
        fields = parse_fields("metadata.name=x")
        await take(store, 1, namespace="team", labels=labels, fields=fields)
        await store.close()
    asked = server.asked[0]
    assert asked.path == "/apis/paddock.dev/v1alpha1/namespaces/team/sandboxes"
    assert asked.query["labelSelector"] == "app in (a,b),!gone"
    assert asked.query["fieldSelector"] == "metadata.name=x"
    assert asked.query["allowWatchBookmarks"] == "true"


async def test_event_types_equal_those_of_the_port() -> None:
    async with scripted_server(streams(event("ADDED", sandbox("a", 5)))) as server:
        store = server.store()
        async with aclosing(store.watch(Sandbox, since="1")) as events:
            first = await anext(events)
        await store.close()
    assert first.change is Change.ADDED
    assert isinstance(first.object, Sandbox)
