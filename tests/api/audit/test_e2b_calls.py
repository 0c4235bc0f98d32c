"""Calls of E2B's API in the audit log: every route, every outcome, once."""

import asyncio
import re

import httpx
import pytest
from starlette.routing import Route

from paddock.api.audit.collapse import MAX_SENDERS, WINDOW_SECONDS
from paddock.api.audit.e2b_calls import CALLS
from paddock.api.e2b import app
from tests.api.audit.recorded import recording
from tests.scenario.paddock import SECRETS, paddock

pytestmark = pytest.mark.looptime

OPEN = {"/health", "/openapi.json"}
ROUTES = [
    (method, route.path)
    for route in app.routes()
    if isinstance(route, Route) and route.path not in OPEN
    for method in sorted((route.methods or set()) - {"HEAD"})
]

UPLOAD = ("PUT", "/templates/uploads/{token}")
"""The URL is the permission: there is no API key, and the URL is not recorded."""
WITH_KEY = [route for route in ROUTES if route != UPLOAD]


def path_of(template: str) -> str:
    """A path of a route; the object does not exist."""
    return re.sub(r"\{[^}]+\}", "absent", template)


def test_every_route_has_a_verb_and_an_object() -> None:
    assert set(ROUTES) - set(CALLS) == set(), "add the new routes to api/audit/e2b_calls.py"
    assert set(CALLS) - set(ROUTES) == set(), "these routes are gone"


async def test_every_route_is_recorded_when_it_changes_something_or_is_refused() -> None:
    lines, audit = recording()
    async with paddock(pool_size=0, audit=audit) as world:
        for method, template in WITH_KEY:
            path, call = path_of(template), CALLS[(method, template)]
            answer = await world.http.request(method, path, json={})
            events = lines.take()
            if method == "GET":
                assert events == [], (method, template)
            else:
                [event] = events
                assert event["verb"] == call.verb
                assert event["objectRef"]["resource"] == call.resource
                assert event["responseStatus"]["code"] == answer.status_code
                assert event["requestURI"] == path
                assert event["user"]["groups"] == ["default", "operator"]
                assert event["auditID"] == answer.headers["x-request-id"]


async def test_every_route_is_recorded_when_it_refuses_a_missing_key() -> None:
    lines, audit = recording()
    async with paddock(pool_size=0, audit=audit) as world:
        for number, (method, template) in enumerate(WITH_KEY):
            if number % MAX_SENDERS == MAX_SENDERS - 1:
                await asyncio.sleep(WINDOW_SECONDS + 1)  # further ones would be counted only
            address = f"2001:db8:{number + 1:x}::1"
            refused = await world.http.request(
                method, path_of(template), headers={"X-API-Key": "", "X-Real-Ip": address}
            )
            assert refused.status_code == 401
            [event] = lines.take()
            call = CALLS[(method, template)]
            assert (event["verb"], event["objectRef"]["resource"]) == (call.verb, call.resource)
            assert event["user"] == {
                "username": "system:anonymous",
                "groups": ["system:unauthenticated"],
            }
            assert event["annotations"] == {"paddock.dev/credential": "missing"}
            assert event["sourceIPs"][0] == address
            assert event["responseStatus"] == {
                "code": 401,
                "status": "Failure",
                "reason": "Unauthorized",
            }


async def test_a_line_has_the_form_of_a_kubernetes_audit_event() -> None:
    lines, audit = recording()
    async with paddock(pool_size=0, audit=audit) as world:
        made = await world.http.post(
            "/kruise/api/sandboxes?token=secret",
            json={"templateID": "base"},
            headers={"X-Request-Id": "mine", "User-Agent": "agent/1", "X-Real-Ip": "192.0.2.7"},
        )
        key = world.plane.keyring.listed(None)[0].id
    [event] = lines.take()
    assert event.pop("requestReceivedTimestamp") <= event.pop("stageTimestamp")
    assert event == {
        "kind": "Event",
        "apiVersion": "audit.k8s.io/v1",
        "level": "Metadata",
        "auditID": "mine",
        "stage": "ResponseComplete",
        "requestURI": "/kruise/api/sandboxes",
        "verb": "create",
        "user": {"username": f"paddock:key:{key}", "uid": key, "groups": ["default", "operator"]},
        "sourceIPs": ["192.0.2.7", "127.0.0.1"],
        "userAgent": "agent/1",
        "objectRef": {"resource": "sandboxes", "apiGroup": "e2b.paddock.dev"},
        "responseStatus": {"code": 201},
        "annotations": {
            "paddock.dev/created": made.json()["sandboxID"],
            "authorization.k8s.io/decision": "allow",
            "authorization.k8s.io/reason": "role operator",
        },
    }


async def test_outcomes_and_created_ids_are_recorded() -> None:
    lines, audit = recording()
    async with paddock(pool_size=0, audit=audit) as world:
        body = {"templateID": "base", "count": 2}
        batch = (await world.http.post("/v2/sandboxes:batch", json=body)).json()["results"]
        boxes = [item["sandbox"]["sandboxID"] for item in batch]
        forked = await world.http.post(f"/sandboxes/{boxes[0]}/fork", json={"count": 2})
        clones = [item["sandbox"]["sandboxID"] for item in forked.json()]
        stored = await world.http.post(f"/sandboxes/{boxes[0]}/snapshots", json={})
        key = (await world.http.post("/api-keys", json={"name": "r", "role": "reader"})).json()
        reader = {"X-API-Key": key["key"]}
        assert (await world.http.get("/sandboxes", headers=reader)).status_code == 200
        refused = await world.http.delete(f"/sandboxes/{boxes[0]}", headers=reader)
        assert refused.status_code == 403
        await world.http.delete("/sandboxes/no%0aone")
        await world.http.delete(f"/sandboxes/{boxes[1]}")
    events = lines.take()
    assert [
        (
            event["verb"],
            event["objectRef"].get("name"),
            event["responseStatus"].get("reason"),
            event["annotations"].get("paddock.dev/created"),
        )
        for event in events
    ] == [
        ("create", None, None, ",".join(boxes)),
        ("fork", boxes[0], None, ",".join(clones)),
        ("snapshot", boxes[0], None, stored.json()["snapshotID"]),
        ("create", None, None, key["id"]),
        ("delete", boxes[0], "Forbidden", None),
        ("delete", "no\\none", "NotFound", None),
        ("delete", boxes[1], None, None),
    ]
    assert events[0]["annotations"]["paddock.dev/requested"] == "2"
    assert events[0]["annotations"]["paddock.dev/created-count"] == "2"
    assert events[4]["annotations"]["authorization.k8s.io/decision"] == "forbid"
    assert events[4]["annotations"]["authorization.k8s.io/reason"]
    assert events[4]["user"]["uid"] == key["id"]


async def test_the_line_is_written_before_the_response_is_sent() -> None:
    lines, audit = recording()
    async with paddock(pool_size=0, audit=audit) as world:
        seen: list[int] = []
        application = world.plane.application()

        async def watched(scope, receive, send) -> None:
            async def note(message) -> None:
                seen.append(len(lines.take()))
                await send(message)

            await application(scope, receive, note)

        transport = httpx.ASGITransport(watched)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://paddock", headers={"X-API-Key": SECRETS.api_key}
        ) as client:
            await client.delete("/sandboxes/absent")
    assert seen[0] == 1
    assert sum(seen) == 1
