"""API keys: expiry, rotation and last use, on virtual time."""

import asyncio
from typing import Any

import pytest

from tests.scenario.paddock import World, paddock

pytestmark = pytest.mark.looptime


async def new_key(world: World, **body: Any) -> dict[str, Any]:
    made = await world.http.post("/api-keys", json={"name": "robot", **body})
    assert made.status_code == 201, made.text
    return made.json()


async def call(world: World, plain: str) -> tuple[int, str]:
    response = await world.http.get("/v2/sandboxes", headers={"X-API-Key": plain})
    body = response.json()
    return response.status_code, "" if response.status_code == 200 else body["message"]


async def shown(world: World, key_id: str) -> dict[str, Any]:
    listed = (await world.http.get("/api-keys")).json()
    return next(key for key in listed if key["id"] == key_id)


async def test_an_expired_key_is_refused_and_shown_as_expired() -> None:
    async with paddock() as world:
        key = await new_key(world, expiresInSeconds=3600)
        await asyncio.sleep(3599)
        assert await call(world, key["key"]) == (200, "")
        assert not (await shown(world, key["id"]))["isExpired"]
        await asyncio.sleep(1)
        status, message = await call(world, key["key"])
        assert status == 401
        assert "expired at 2030-01-01 01:00:00 UTC" in message
        assert (await shown(world, key["id"]))["isExpired"]
        path = f"/api-keys/{key['id']}"
        assert (await world.http.patch(path, json={"expiresInSeconds": 60})).status_code == 200
        assert await call(world, key["key"]) == (200, "")
        assert (await world.http.patch(path, json={"expiresInSeconds": None})).status_code == 200
        await asyncio.sleep(7200)
        assert await call(world, key["key"]) == (200, "")


@pytest.mark.parametrize("seconds", [0, -1, 10**12, "1d", 1.5])
async def test_a_lifetime_out_of_bounds_is_refused(seconds: object) -> None:
    async with paddock() as world:
        body = {"name": "n", "expiresInSeconds": seconds}
        made = await world.http.post("/api-keys", json=body)
        assert made.status_code == 400
        assert "expiresInSeconds" in made.json()["message"]


async def test_a_rotated_key_is_accepted_until_its_grace_ends() -> None:
    async with paddock() as world:
        key = await new_key(world, scopes=["create"])
        path = f"/api-keys/{key['id']}/rotate"
        rotated = (await world.http.post(path, json={"graceSeconds": 600})).json()
        assert rotated["key"] != key["key"]
        assert (rotated["id"], rotated["scopes"]) == (key["id"], ["create"])
        assert (await shown(world, key["id"]))["previousKeyUntil"] is not None
        await asyncio.sleep(599)
        assert await call(world, key["key"]) == (200, "")
        await asyncio.sleep(1)
        status, message = await call(world, key["key"])
        assert status == 401
        assert "replaced by `paddock keys rotate`" in message
        assert await call(world, rotated["key"]) == (200, "")
        assert (await shown(world, key["id"]))["previousKeyUntil"] is None


async def test_a_rotation_without_grace_ends_every_key_before_at_once() -> None:
    async with paddock() as world:
        key = await new_key(world)
        path = f"/api-keys/{key['id']}/rotate"
        second = (await world.http.post(path, json={"graceSeconds": 600})).json()["key"]
        third = (await world.http.post(path)).json()["key"]
        assert [(await call(world, each))[0] for each in (key["key"], second, third)] == [
            401,
            401,
            200,
        ]
        await world.http.delete(f"/api-keys/{key['id']}")
        assert (await call(world, third))[0] == 401


async def test_revoking_ends_both_keys_of_a_rotation() -> None:
    async with paddock() as world:
        key = await new_key(world)
        path = f"/api-keys/{key['id']}"
        rotated = await world.http.post(f"{path}/rotate", json={"graceSeconds": 600})
        assert (await world.http.delete(path)).status_code == 204
        for plain in (key["key"], rotated.json()["key"]):
            assert (await call(world, plain))[0] == 401


async def test_the_last_use_is_shown() -> None:
    async with paddock() as world:
        key = await new_key(world)
        assert (await shown(world, key["id"]))["lastUsed"] is None
        await call(world, key["key"])
        assert (await shown(world, key["id"]))["lastUsed"] is not None
