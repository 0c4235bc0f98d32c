"""Metadata keys for options that E2B's API lacks: names, and keeping failed sandboxes."""

from datetime import timedelta

import pytest

from paddock.kit.errors import InvalidError
from paddock.resources.kinds.sandbox import LABEL_GIVEN_UP, Sandbox
from paddock.runtime.simulated import Operation
from tests.scenario.paddock import World, paddock

pytestmark = pytest.mark.looptime

PREFIX = "e2b.agents.kruise.io/"


async def create(world: World, expected: int, headers: dict | None = None, **keys: str) -> dict:
    metadata = {f"{PREFIX}{name.replace('_', '-')}": value for name, value in keys.items()}
    body = {"templateID": "base", "timeout": 60, "metadata": metadata}
    response = await world.http.post("/sandboxes", json=body, headers=headers)
    assert response.status_code == expected, response.text
    return response.json()


def names(world: World) -> list[str]:
    return [item.metadata.name for item in world.provider.sandboxes("default")]


async def test_a_name_or_a_name_prefix_can_be_given() -> None:
    async with paddock(pool_size=0) as world:
        await create(world, 201, sandbox_name="mine")
        again = {"Idempotency-Key": "once"}
        first = await create(world, 201, again, sandbox_generate_name="worker-")
        second = await create(world, 201, again, sandbox_generate_name="worker-")
        assert first["sandboxID"] == second["sandboxID"]
        assert sorted(names(world)) == ["mine", f"worker-{first['sandboxID']}"]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"sandbox_name": "a", "sandbox_generate_name": "b-"}, "only one of sandbox-name"),
        ({"sandbox_name": "Mine"}, "is not a valid name"),
        ({"sandbox_name": "mine-"}, "is not a valid name"),
        ({"sandbox_generate_name": "b_"}, "is not a valid name"),
        ({"reserve_failed_sandbox_for": "a while"}, "neither forever nor a duration"),
        ({"cpu_limit": "many"}, "not a quantity"),
    ],
)
async def test_invalid_extension_keys_are_refused_by_name(keys, words: str) -> None:
    async with paddock(pool_size=0) as world:
        response = await create(world, 400, **keys)
        assert words in response["message"]
        assert "metadata[" in response["message"]
        assert names(world) == []


@pytest.mark.parametrize(
    ("keys", "seconds"),
    [
        ({"reserve_failed_sandbox": "true"}, 60),
        ({"reserve_failed_sandbox_for": "1h"}, 3600),
        ({"reserve_failed_sandbox_for": "forever"}, 10**9),
    ],
)
async def test_a_failed_sandbox_is_kept_for_the_given_time(keys, seconds: int) -> None:
    async with paddock(pool_size=0) as world:
        world.runtime.fail_next(Operation.CREATE, InvalidError("no such image"))
        began = world.plane.clock.now()
        await create(world, 503, **keys)
        await world.until(lambda: LABEL_GIVEN_UP in kept(world).metadata.labels)
        assert kept(world).status.message == "no such image"
        end = kept(world).spec.shutdown_time
        assert end is not None
        assert abs(end - began - timedelta(seconds=seconds)) < timedelta(seconds=5)


def kept(world: World) -> Sandbox:
    [sandbox] = world.provider.sandboxes("default")
    return sandbox


@pytest.mark.parametrize("keys", [{}, {"reserve_failed_sandbox_for": "never"}])
async def test_a_failed_sandbox_is_deleted_unless_kept(keys) -> None:
    async with paddock(pool_size=0) as world:
        world.runtime.fail_next(Operation.CREATE, InvalidError("no such image"))
        await create(world, 503, **keys)
        await world.until(lambda: not names(world))
