"""Watches over a real connection."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from paddock.api.kube.settings import KubeApiSettings
from paddock.resources import codec
from paddock.resources.kinds.sandbox import Sandbox, SandboxSpec
from paddock.resources.kinds.template import TemplateRef
from paddock.resources.meta import Key, ObjectMeta, with_meta
from tests.api.kube.conftest import TOKEN
from tests.api.kube.objects import ROOT, SANDBOXES, sandbox
from tests.api.kube.server import Server, serving

pytestmark = pytest.mark.timeout(120)

AUTHORIZED = {"Authorization": f"Bearer {TOKEN}"}
TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json"


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60, headers=AUTHORIZED) as client:
        yield client


@contextmanager
def watching(http: httpx.Client, path: str = SANDBOXES, accept: str = "", **params: Any):
    headers = {"Accept": accept} if accept else {}
    with http.stream(
        "GET", path, params={"watch": "true", "timeoutSeconds": "50"} | params, headers=headers
    ) as response:
        assert response.status_code == 200
        yield (json.loads(line) for line in response.iter_lines())


def told(event: dict[str, Any]) -> tuple[str, str]:
    return event["type"], event["object"]["metadata"].get("name", "")


def test_a_watch_starts_with_existing_objects(http: httpx.Client):
    http.post(SANDBOXES, json=sandbox("a"))
    with watching(http) as events:
        assert told(next(events)) == ("ADDED", "a")
        http.post(SANDBOXES, json=sandbox("b"))
        assert told(next(events)) == ("ADDED", "b")
        http.patch(
            f"{SANDBOXES}/b",
            content='{"spec":{"paused":true}}',
            headers={"Content-Type": "application/merge-patch+json"},
        )
        event = next(events)
        assert told(event) == ("MODIFIED", "b")
        assert event["object"]["spec"]["paused"] is True
        http.delete(f"{SANDBOXES}/a")
        assert told(next(events)) == ("DELETED", "a")


def test_a_watch_continues_from_a_list(http: httpx.Client):
    http.post(SANDBOXES, json=sandbox("a"))
    version = http.get(SANDBOXES).json()["metadata"]["resourceVersion"]
    http.post(SANDBOXES, json=sandbox("b"))
    with watching(http, resourceVersion=version) as events:
        assert told(next(events)) == ("ADDED", "b")


def test_an_object_that_leaves_a_watched_selector_is_reported_as_deleted(http: httpx.Client):
    http.post(SANDBOXES, json=sandbox("a", labels={"x": "1"}))
    with watching(http, path=f"{ROOT}/sandboxes", labelSelector="x=1") as events:
        assert told(next(events)) == ("ADDED", "a")
        http.post(SANDBOXES, json=sandbox("b"))
        http.patch(
            f"{SANDBOXES}/a",
            content='{"metadata":{"labels":{"x":"2"}}}',
            headers={"Content-Type": "application/merge-patch+json"},
        )
        assert told(next(events)) == ("DELETED", "a")
    with watching(http, fieldSelector="metadata.name=b") as events:
        assert told(next(events)) == ("ADDED", "b")


def test_a_single_object_can_be_watched_by_its_path(http: httpx.Client):
    http.post(SANDBOXES, json=sandbox("a"))
    http.post(SANDBOXES, json=sandbox("b"))
    with watching(http, path=f"{SANDBOXES}/b") as events:
        assert told(next(events)) == ("ADDED", "b")


def test_initial_events_end_with_a_bookmark_if_requested(http: httpx.Client):
    http.post(SANDBOXES, json=sandbox("a"))
    with watching(
        http,
        sendInitialEvents="true",
        allowWatchBookmarks="true",
        resourceVersionMatch="NotOlderThan",
    ) as events:
        assert told(next(events)) == ("ADDED", "a")
        bookmark = next(events)
        assert bookmark["type"] == "BOOKMARK"
        metadata = bookmark["object"]["metadata"]
        assert metadata["annotations"] == {"k8s.io/initial-events-end": "true"}
        assert metadata["resourceVersion"]


def test_an_idle_watch_sends_bookmarks_and_misses_nothing():
    settings = KubeApiSettings(tokens=(TOKEN,), bookmark_seconds=0.05)
    with (
        serving(settings) as server,
        httpx.Client(base_url=server.url, timeout=60, headers=AUTHORIZED) as http,
    ):
        http.post(SANDBOXES, json=sandbox("a"))
        version = http.get(SANDBOXES).json()["metadata"]["resourceVersion"]
        with watching(http, resourceVersion=version, allowWatchBookmarks="true") as events:
            for name in ("b", "c"):
                for bookmark in (next(events), next(events)):
                    assert bookmark["type"] == "BOOKMARK"
                    assert bookmark["object"]["metadata"]["resourceVersion"] == version
                http.post(SANDBOXES, json=sandbox(name))
                change = next(event for event in events if event["type"] != "BOOKMARK")
                assert told(change) == ("ADDED", name)
                version = change["object"]["metadata"]["resourceVersion"]
        with watching(http, resourceVersion=version, timeoutSeconds="1") as events:
            assert list(events) == []  # nobody who does not ask for bookmarks gets one


def test_an_expired_version_ends_the_watch_with_410(server: Server, http: httpx.Client):
    http.post(SANDBOXES, json=sandbox("a"))
    version = http.get(SANDBOXES).json()["metadata"]["resourceVersion"]

    async def write_much() -> None:
        for index in range(120):
            box = await server.store.get(Sandbox, Key("default", "a"))
            await server.store.update(with_meta(box, labels={"n": str(index)}))

    server.do(write_much())
    with watching(http, resourceVersion=version) as events:
        event = next(events)
        assert event["type"] == "ERROR"
        assert (event["object"]["code"], event["object"]["reason"]) == (410, "Expired")
        assert list(events) == []


def test_a_watch_ends_at_its_timeout(http: httpx.Client):
    with watching(http, timeoutSeconds="1") as events:
        assert list(events) == []


def test_a_table_watch_has_columns_in_the_first_event_only(http: httpx.Client):
    http.post(SANDBOXES, json=sandbox("a"))
    with watching(http, accept=TABLE) as events:
        first = next(events)["object"]
        assert first["kind"] == "Table"
        assert first["columnDefinitions"][0]["name"] == "Name"
        http.post(SANDBOXES, json=sandbox("b"))
        second = next(events)["object"]
        assert second["columnDefinitions"] == []
        assert second["rows"][0]["cells"][0] == "b"


def test_a_watch_returns_stored_objects_if_requested_first(
    http: httpx.Client,
):
    stored = "application/json;as=Stored,application/json"
    http.post(SANDBOXES, json=sandbox("a"))

    with watching(http, accept=stored) as events:
        short = next(events)
        with watching(http) as others:
            full = next(others)
        http.delete(f"{SANDBOXES}/a")
        gone = next(events)

    assert told(short) == told(full) == ("ADDED", "a")
    assert len(json.dumps(short)) < len(json.dumps(full))
    objects = [codec.from_builtins(Sandbox, event["object"]) for event in (short, full)]
    assert objects[0] == objects[1]
    assert told(gone) == ("DELETED", "a")
    assert http.get(f"{SANDBOXES}", headers={"Accept": stored}).status_code == 200


def test_a_disconnected_watcher_is_removed(server: Server, http: httpx.Client):
    with watching(http):
        pass

    async def write() -> Sandbox:
        spec = SandboxSpec(template_ref=TemplateRef(name="t"))
        meta = ObjectMeta(name="later", namespace="default")
        return await server.store.create(Sandbox(metadata=meta, spec=spec))

    assert server.do(write()).metadata.name == "later"
    assert http.get(f"{SANDBOXES}/later").status_code == 200
