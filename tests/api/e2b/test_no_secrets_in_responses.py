"""Responses do not reveal whether a sandbox never existed, belongs to another team or was
killed."""

import asyncio
import json
from typing import Any

import pytest

from paddock.api.e2b.openapi import PREFIX, document
from paddock.resources.kinds.sandbox import Sandbox
from tests.scenario.paddock import World, paddock

pytestmark = pytest.mark.looptime

BODIES: dict[str, dict[str, Any]] = {
    "/timeout": {"timeout": 60},
    "/network": {"allowOut": ["192.0.2.1"]},
    "/snapshots": {"name": "kept"},
}
"""Other routes take an empty body."""
CALLS = [
    (method.upper(), path)
    for path, methods in document()["paths"].items()
    for method in methods
    if "/sandboxes/{id}" in path
]
NEVER = "i" + "0" * 20


def test_every_route_of_a_sandbox_is_covered() -> None:
    assert {path.rpartition("}")[2] for _, path in CALLS} >= {
        *("", "/pause", "/resume", "/connect", "/timeout", "/refreshes", "/network"),
        *("/fork", "/snapshots", "/metrics", "/logs"),
    }


@pytest.mark.parametrize(("method", "path"), CALLS)
async def test_unknown_foreign_and_killed_sandboxes_look_the_same(method: str, path: str) -> None:
    async with paddock() as world:
        running, paused, killed, dying = [await made(world) for _ in range(4)]
        await done(world, "POST", f"/sandboxes/{paused}/pause")
        await done(world, "DELETE", f"/sandboxes/{killed}")
        # Killed, but still present: its node does not finish the deletion.
        world.runtime.destroy = lambda _uid: asyncio.Event().wait()  # type: ignore[assignment]
        await done(world, "DELETE", f"/sandboxes/{dying}")
        claims = [item.spec.claim for item in world.provider.all(Sandbox)]
        assert dying in [claim.sandbox_id for claim in claims if claim]
        strangers = await key_of(world, "strangers")
        unknown = await ask(world, method, path, NEVER)
        assert unknown[0] == 404, unknown
        told = {
            (name, key, prefix): await ask(world, method, prefix + path, sandbox_id, key)
            for name, sandbox_id, key in (
                ("unknown", NEVER, strangers),
                ("foreign", running, strangers),
                ("foreign and paused", paused, strangers),
                ("killed", killed, None),
                ("dying", dying, None),
                ("foreign and killed", killed, strangers),
                ("foreign and dying", dying, strangers),
            )
            for prefix in ("", PREFIX)
        }
        assert told == dict.fromkeys(told, unknown)
        # No call reached a sandbox.
        for sandbox_id, state in ((running, "running"), (paused, "paused")):
            detail = await world.http.get(f"/sandboxes/{sandbox_id}")
            assert detail.json()["state"] == state


async def test_bulk_calls_return_only_the_callers_sandboxes() -> None:
    async with paddock() as world:
        foreign, killed = [await made(world) for _ in range(2)]
        await done(world, "DELETE", f"/sandboxes/{killed}")
        strangers = await key_of(world, "strangers")
        answers = [
            await ask(world, "GET", "/sandboxes/metrics?sandbox_ids={id}", sandbox_id, key)
            for sandbox_id, key in ((NEVER, None), (foreign, strangers), (killed, None))
        ]
        assert answers == [answers[0]] * 3


async def ask(
    world: World, method: str, path: str, sandbox_id: str, key: str | None = None
) -> tuple[int, dict[str, str], Any]:
    """Return the response without the parts that differ per request."""
    response = await world.http.request(
        method,
        path.format(id=sandbox_id),
        json=None if method == "GET" else BODIES.get(path.rpartition("}")[2], {}),
        headers={"X-API-Key": key} if key else {},
    )
    headers = {name: value for name, value in response.headers.items() if name != "x-request-id"}
    text = response.text.replace(sandbox_id, "ID").replace(
        response.headers["x-request-id"], "REQUEST"
    )
    return response.status_code, headers, json.loads(text)


async def made(world: World) -> str:
    response = await world.http.post("/v2/sandboxes", json={"templateID": "base", "timeout": 600})
    assert response.status_code == 201, response.text
    return response.json()["sandboxID"]


async def done(world: World, method: str, path: str) -> None:
    response = await world.http.request(method, path)
    assert response.status_code == 204, response.text


async def key_of(world: World, team: str) -> str:
    response = await world.http.post("/api-keys", json={"name": "k", "teamName": team})
    assert response.status_code == 201, response.text
    return response.json()["key"]
