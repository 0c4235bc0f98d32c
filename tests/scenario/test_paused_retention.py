"""A paused sandbox is kept for its retention: the default, its own, or indefinitely."""

import asyncio
from datetime import timedelta

import pytest

from paddock.claims.requests import NewSandbox
from paddock.kit.errors import NotFoundError
from paddock.resources.kinds.builtin import Event
from paddock.resources.kinds.claim import SandboxClaim, SandboxClaimSpec
from paddock.resources.kinds.sandbox import Phase, Sandbox
from paddock.resources.meta import ObjectMeta
from tests.scenario.paddock import CALLER, World, paddock

pytestmark = pytest.mark.looptime

TWO_WEEKS = 14 * 24 * 3600.0
HOUR = 3600.0


async def paused(world: World, **wanted) -> Sandbox:
    sandbox = await world.manager.claims.create(CALLER, NewSandbox(template="base", **wanted))
    assert sandbox.spec.claim is not None
    return await world.manager.lifecycle.pause(CALLER, sandbox.spec.claim.sandbox_id)


def kept_seconds(world: World, sandbox: Sandbox) -> float | None:
    """Return how long a paused sandbox is kept from now on; None: indefinitely."""
    end = sandbox.spec.shutdown_time
    return None if end is None else (end - world.plane.clock.now()).total_seconds()


@pytest.mark.parametrize(
    ("settings", "wanted", "seconds"),
    [
        pytest.param({}, {}, TWO_WEEKS, id="two weeks by default"),
        pytest.param({}, {"auto_pause": True}, TWO_WEEKS, id="with auto-pause"),
        pytest.param({"paused_retention_seconds": 3600}, {}, HOUR, id="as the setting says"),
        pytest.param({"paused_retention_seconds": 0}, {}, None, id="0 means indefinitely"),
        pytest.param({}, {"paused_retention_seconds": 3600}, HOUR, id="its own"),
        pytest.param({}, {"paused_retention_seconds": None}, None, id="for ever on request"),
        pytest.param({}, {"timeout_seconds": None}, None, id="it never ends"),
    ],
)
async def test_a_paused_sandbox_is_kept_for_its_retention(settings, wanted, seconds) -> None:
    async with paddock(**settings) as world:
        asleep = await paused(world, **wanted)
        kept = kept_seconds(world, asleep)
        assert kept == (None if seconds is None else pytest.approx(seconds, abs=5))


async def test_a_sandbox_is_deleted_after_its_retention_with_an_event() -> None:
    async with paddock(paused_retention_seconds=3600) as world:
        asleep = await paused(world)
        sandbox_id = asleep.spec.claim.sandbox_id
        await asyncio.sleep(HOUR - 60)
        assert (await world.manager.queries.get(CALLER, sandbox_id)).status.phase is Phase.PAUSED
        await asyncio.sleep(120)
        with pytest.raises(NotFoundError):
            await world.manager.queries.get(CALLER, sandbox_id)
        await world.until(lambda: world.provider.sandbox(asleep.key) is None)
        await asyncio.sleep(10)
        events = (await world.store.list(Event)).items
        [event] = [item for item in events if item.reason == "RetentionEnded"]
        assert event.involved_object.uid == asleep.metadata.uid
        assert event.message == "deleted: it was paused for its retention of 3600 s"


async def test_a_timeout_is_not_reported_as_a_retention() -> None:
    async with paddock() as world:
        made = await world.manager.claims.create(
            CALLER, NewSandbox(template="base", timeout_seconds=60)
        )
        await world.until(lambda: world.provider.sandbox(made.key) is None, seconds=120)
        await asyncio.sleep(10)
        events = (await world.store.list(Event)).items
        assert not [item for item in events if item.reason == "RetentionEnded"]


async def test_each_pause_starts_the_retention_again() -> None:
    async with paddock(paused_retention_seconds=3600) as world:
        asleep = await paused(world, timeout_seconds=600)
        for _ in range(3):
            await asyncio.sleep(HOUR - 60)
            sandbox_id = asleep.spec.claim.sandbox_id
            resumed = await world.manager.lifecycle.resume(CALLER, sandbox_id, timeout_seconds=600)
            assert resumed.spec.retained_until is None
            assert kept_seconds(world, resumed) == pytest.approx(600, abs=5)
            asleep = await world.manager.lifecycle.pause(CALLER, sandbox_id)
            assert kept_seconds(world, asleep) == pytest.approx(HOUR, abs=5)


async def test_a_clone_keeps_the_retention_of_its_source() -> None:
    async with paddock() as world:
        kept = await world.manager.claims.create(
            CALLER, NewSandbox(template="base", paused_retention_seconds=None)
        )
        [clone] = await world.manager.snapshots.fork(
            CALLER, kept.spec.claim.sandbox_id, count=1, timeout_seconds=600
        )
        assert clone.sandbox is not None
        assert clone.sandbox.spec.paused_retention_seconds is None


async def test_sandboxes_of_a_claim_with_an_end_have_the_default_retention() -> None:
    async with paddock() as world:
        end = world.plane.clock.now() + timedelta(hours=1)
        for name, shutdown_time in (("ends", end), ("stays", None)):
            spec = SandboxClaimSpec(template_name="base", shutdown_time=shutdown_time)
            await world.store.create(
                SandboxClaim(metadata=ObjectMeta(name=name, namespace="default"), spec=spec)
            )
        found: dict[str, Sandbox] = {}

        def are_claimed() -> bool:
            for item in world.provider.informer(Sandbox).all():
                if (name := item.metadata.labels.get("paddock.dev/claim")) is not None:
                    found[name] = item
            return len(found) == 2

        await world.until(are_claimed)
        assert found["ends"].spec.paused_retention_seconds == TWO_WEEKS
        assert found["stays"].spec.paused_retention_seconds is None
