"""Idle sandboxes are probed as their template defines; unhealthy ones are replaced."""

import asyncio

import pytest
from msgspec import structs

from paddock.claims.requests import NewSandbox
from paddock.kit.errors import RateLimitedError
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.kinds.template import Probe, SandboxTemplate
from paddock.resources.meta import Key
from tests.scenario.paddock import CALLER, World, paddock

pytestmark = pytest.mark.looptime

BASE = Key("default", "base")
PROBE = Probe(command="true", period_seconds=10, timeout_seconds=2, failure_threshold=3)


class FakeProber:
    """Fake prober: `sick` sandboxes fail, `mute` ones never respond."""

    def __init__(self, world: World) -> None:
        self.sick: set[str] = set()
        self.mute: set[str] = set()
        self.asked: list[str] = []
        self.everybody_is_sick = False
        self.verdicts: list[str | None] = []
        """The next results, in order, for any sandbox."""
        world.plane.controllers.probes._prober = self

    async def __call__(self, sandbox: Sandbox, probe: Probe) -> str | None:
        uid = sandbox.metadata.uid
        self.asked.append(uid)
        if self.verdicts:
            return self.verdicts.pop(0)
        if uid in self.mute:
            await asyncio.sleep(1000)
        return "a cold" if uid in self.sick or self.everybody_is_sick else None


async def with_probe(world: World, size: int) -> list[Sandbox]:
    """Add a probe to the template; return the pool's new sandboxes."""
    await world.provider.write.mutate(
        SandboxTemplate,
        BASE,
        lambda item: structs.replace(
            item, spec=structs.replace(item.spec, probe=PROBE, env={"WITH": "probe"})
        ),
    )

    def probed() -> bool:
        found = world.plane.pool_members.members(BASE).available.values()
        return len(found) == size and all(
            item.spec.template and item.spec.template.probe for item in found
        )

    await world.until(probed, seconds=120)
    return list(world.plane.pool_members.members(BASE).available.values())


@pytest.mark.parametrize("kind", ["sick", "mute"])
async def test_a_sandbox_that_fails_its_probes_in_a_row_is_replaced(kind: str) -> None:
    async with paddock(pool_size=2) as world:
        patients = FakeProber(world)
        first, second = await with_probe(world, 2)
        getattr(patients, kind).add(first.metadata.uid)
        await asyncio.sleep(15)
        assert world.provider.sandbox(first.key) is not None
        await world.until(lambda: world.provider.sandbox(first.key) is None, seconds=60)
        await world.stocked(2)
        assert world.provider.sandbox(second.key) is not None


async def test_single_probe_failures_are_tolerated() -> None:
    async with paddock(pool_size=1) as world:
        patients = FakeProber(world)
        (only,) = await with_probe(world, 1)
        patients.verdicts = ["a cold", "a cold", None] * 2
        await world.until(lambda: not patients.verdicts, seconds=100)
        # After the last listed result, too.
        asked = len(patients.asked)
        await world.until(lambda: len(patients.asked) > asked, seconds=30)
        assert world.provider.sandbox(only.key) is not None


async def test_a_sandbox_is_not_claimable_before_its_first_successful_probe() -> None:
    async with paddock(pool_size=2) as world:
        patients = FakeProber(world)
        patients.everybody_is_sick = True
        with pytest.raises(TimeoutError):
            await with_probe(world, 2)
        wanted = NewSandbox(template="base", create_on_no_stock=False, claim_timeout_seconds=5)
        with pytest.raises(RateLimitedError):
            await world.manager.claims.create(CALLER, wanted)


async def test_claimed_sandboxes_are_not_probed() -> None:
    async with paddock(pool_size=1) as world:
        patients = FakeProber(world)
        await with_probe(world, 1)
        claimed = await world.manager.claims.create(CALLER, NewSandbox(template="base"))
        # The replacement shows that the claim was seen; a probe may have been in flight before.
        await world.stocked(1)
        patients.asked.clear()
        await asyncio.sleep(60)
        await world.until(lambda: bool(patients.asked))
        assert claimed.metadata.uid not in patients.asked
