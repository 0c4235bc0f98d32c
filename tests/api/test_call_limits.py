"""Rates of API calls, by key and by address, on virtual time."""

import asyncio
from typing import Any

import httpx
import pytest

from paddock.api.call_limits import MAX_BUCKETS, CallLimits
from paddock.kit.clock import ManualClock
from paddock.kit.errors import RateLimitedError
from tests.scenario.paddock import World, paddock

pytestmark = pytest.mark.looptime


async def call(world: World, key: str, **headers: str) -> httpx.Response:
    return await world.http.get("/v2/sandboxes", headers={"X-API-Key": key, **headers})


async def new_key(world: World, **options: Any) -> str:
    return (await world.plane.keyring.create(name="k", team="red", **options))[1]


async def test_calls_of_one_key_are_limited_and_others_are_served() -> None:
    async with paddock(calls_per_second_per_key=2) as world:
        busy, other = await new_key(world), await new_key(world)
        answers = [(await call(world, busy)).status_code for _ in range(21)]
        assert answers == [200] * 20 + [429]
        refused = await call(world, busy)
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["code"] == 429
        assert "too many calls by this key: at most 2 per second" in refused.json()["message"]
        assert (await call(world, other)).status_code == 200
        await asyncio.sleep(1)
        answers = [(await call(world, busy)).status_code for _ in range(3)]
        assert answers == [200, 200, 429]


async def test_calls_of_one_address_are_limited_whatever_its_keys() -> None:
    async with paddock(calls_per_second_per_address=1) as world:
        keys = [await new_key(world) for _ in range(11)]
        sent = {"X-Real-IP": "192.0.2.7"}
        answers = [(await call(world, key, **sent)).status_code for key in keys]
        assert answers == [200] * 10 + [429]
        assert (await call(world, keys[0], **{"X-Real-IP": "192.0.2.8"})).status_code == 200
        # A process of this machine, such as a gateway, has no address.
        assert (await call(world, keys[0])).status_code == 200


async def test_the_default_limits_allow_hundreds_of_creates_at_once() -> None:
    async with paddock() as world:
        key = await new_key(world)
        answers = await asyncio.gather(*(call(world, key) for _ in range(1000)))
        assert {answer.status_code for answer in answers} == {200}


def test_a_limit_of_zero_is_no_limit() -> None:
    limits = CallLimits(ManualClock())
    for _ in range(10_000):
        limits.take("192.0.2.7", "k")


def test_memory_of_call_limits_is_bounded() -> None:
    limits = CallLimits(ManualClock(), per_key=0.1)
    for number in range(MAX_BUCKETS + 50):
        limits.take(None, str(number))
    assert len(limits._keys._buckets) == MAX_BUCKETS
    with pytest.raises(RateLimitedError):
        limits.take(None, str(MAX_BUCKETS))
