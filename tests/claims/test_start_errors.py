"""Creates that time out report the last start error."""

import asyncio

import pytest

from paddock.kit.errors import UnavailableError
from paddock.resources.kinds.sandbox import Sandbox
from paddock.runtime.simulated import Operation, SimulatedRuntime
from tests.scenario.paddock import World, paddock

pytestmark = pytest.mark.looptime


async def starting(world: World) -> Sandbox:
    """Return the claimed sandbox that does not start."""
    await world.until(lambda: any(item.spec.claim for item in world.provider.all(Sandbox)))
    return next(item for item in world.provider.all(Sandbox) if item.spec.claim)


async def test_a_create_that_times_out_reports_the_last_start_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attempts = 0

    async def create(_self: object, _blueprint: object) -> None:
        nonlocal attempts
        attempts += 1
        raise UnavailableError(f"cannot mount the volume (attempt {attempts})")

    monkeypatch.setattr(SimulatedRuntime, "create", create)
    async with paddock(pool_size=0) as world:
        response = await world.http.post("/sandboxes", json={"templateID": "base", "timeout": 300})
        assert response.status_code == 504, response.text
        assert (
            "its phase is Pending: cannot mount the volume (attempt" in response.json()["message"]
        )
        # The status changes with every attempt, and still there is a backoff.
        assert attempts < 60


async def test_the_start_error_is_gone_once_the_sandbox_has_started() -> None:
    async with paddock(pool_size=0) as world:
        world.runtime.fail_next(Operation.CREATE, UnavailableError("the node is busy"))
        creating = asyncio.ensure_future(world.http.post("/sandboxes", json={"templateID": "base"}))
        sandbox = await starting(world)

        def message() -> str:
            current = world.provider.sandbox(sandbox.key)
            return current.status.message if current is not None else ""

        await world.until(lambda: message() == "the node is busy")
        assert (await creating).status_code == 201
        assert message() == ""
