"""The scenarios: each injects faults, waits, and checks the world."""

import asyncio
import random

from paddock.claims.quota.ledger import Dimension, Quota, QuotaLimit, QuotaScope
from paddock.claims.requests import NewSandbox
from paddock.kit.tasks import background
from paddock.resources.kinds.sandbox import Sandbox
from tests.faults.broken import ROUGH
from tests.faults.invariants import Audit, hold
from tests.faults.storm import Storm
from tests.faults.virtual import Trace
from tests.faults.worlds import FaultyWorld, faulty_world
from tests.scenario.paddock import CALLER

MOST = 20
"""Above what requests without an answer may keep, so that clients always get more."""
KILLS = 4
DEPOSED = 2
SUCCESSORS = 2
SETTLE_SECONDS = 200
JUMPS = (-40, -5, 5, 40)


async def storm(seed: int, trace: Trace) -> None:
    """All faults at random, and repeated kills of the control plane."""
    async with faulty_world(seed, trace) as world:
        limit = QuotaLimit(Dimension.COUNT, QuotaScope.ALL, MOST)
        await world.planes[0].control.keyring.set_team_quota("default", Quota((limit,)))
        audit = Audit(world, most_claimed=MOST)
        clients = Storm(world, until=lambda: world.has_killed(KILLS))
        async with background(audit.follow(), name="audit"):
            await asyncio.sleep(2)
            world.faults.rates = ROUGH
            async with background(
                _inject_faults(world, clients, kills=KILLS), name="trouble"
            ) as harm:
                await clients.run()
                assert not harm.done(), harm.exception()
            assert world.kills == KILLS, "clients were done before all of the harm was"
            await world.is_restored()
            await hold(world, clients, audit, seconds=SETTLE_SECONDS)
        assert any(map(clients.is_certain, clients.given))
        assert world.faults.seen


async def jumps(seed: int, trace: Trace) -> None:
    """The wall clock is set forward and back, at last beyond every deadline."""
    async with faulty_world(seed, trace) as world:
        audit, clients = Audit(world, most_claimed=None), Storm(world, clients=5, rounds=10)
        async with background(audit.follow(), name="audit"):
            await asyncio.sleep(2)
            async with background(_inject_faults(world, clients, jumps=True), name="trouble"):
                await clients.run()
            await world.is_restored()
            # Past every deadline in one step: no timer has fired, and all must be applied.
            clients.jump(3600)
            await hold(world, clients, audit, seconds=60)


async def leaders(seed: int, trace: Trace) -> None:
    """Two control planes on one store; the leader is killed repeatedly."""
    async with faulty_world(seed, trace, planes=2) as world:
        audit = Audit(world, most_claimed=None)
        clients = Storm(world, until=lambda: world.has_killed(DEPOSED))
        async with background(audit.follow(), name="audit"):
            await asyncio.sleep(5)
            world.faults.rates = ROUGH
            async with background(_stop_leader(world), name="deposing"):
                await clients.run()
            await world.is_restored()
            await hold(world, clients, audit, seconds=SETTLE_SECONDS)
            assert sum(plane.leads for plane in world.planes) == 1
        assert world.kills >= DEPOSED


async def stops(seed: int, trace: Trace) -> None:
    """The leader of two control planes is stopped beyond its lease, and the clock jumps.

    When it resumes, it believes for a moment that it still leads.
    """
    async with faulty_world(seed, trace, planes=2) as world:
        audit, succeeded = Audit(world, most_claimed=None), list[bool]()
        clients = Storm(world, until=lambda: succeeded.count(True) >= SUCCESSORS)
        async with background(audit.follow(), name="audit"):
            await asyncio.sleep(5)
            world.faults.rates = ROUGH
            async with background(_stop(world, clients, succeeded), name="stopping") as harm:
                await clients.run()
                assert not harm.done(), harm.exception()
            await hold(world, clients, audit, seconds=SETTLE_SECONDS)
            assert sum(plane.leads for plane in world.planes) == 1
        assert succeeded.count(True) >= SUCCESSORS
        assert any(map(clients.is_certain, clients.given))


async def rush(seed: int, trace: Trace) -> None:
    """Clients of two control planes claim the same stock at once, and more than it has."""
    async with faulty_world(seed, trace, planes=2, pool_size=12) as world:
        audit = Audit(world, most_claimed=None)
        async with background(audit.follow(), name="audit"):
            await asyncio.sleep(5)
            made = await asyncio.gather(
                *(
                    world.planes[number % 2].manager.claims.create(
                        CALLER, NewSandbox(template="base")
                    )
                    for number in range(20)
                )
            )
            await asyncio.sleep(5)
        assert not audit.violations, audit.violations
        assert len({sandbox.metadata.uid for sandbox in made}) == len(made)
        for sandbox in made:
            stored = await world.store.get(Sandbox, sandbox.key)
            assert stored.spec.claim == sandbox.spec.claim, "it was given to somebody else"


SCENARIOS = {"storm": storm, "jumps": jumps, "leaders": leaders, "stops": stops, "rush": rush}


async def _inject_faults(
    world: FaultyWorld, clients: Storm, *, kills: int = 0, jumps: bool = False
) -> None:
    """Inject faults until cancelled."""
    dice = random.Random(world.seed * 31 + 5)
    left = kills
    while True:
        await asyncio.sleep(1 + dice.random() * 4)
        roll = dice.random()
        if left and roll < 0.6:
            left -= 1
            await world.replace(dice.choice(world.planes))
        elif jumps and roll < 0.8:
            clients.jump(dice.choice(JUMPS))
        elif roll < 0.9:
            await _until_cancelled(world, dice)
        else:
            clients.crash_one()


async def _until_cancelled(world: FaultyWorld, dice: random.Random) -> None:
    """Make the node unavailable, stop a side, or fill the disk, for seconds."""
    faults, what = world.faults, dice.choice(("node gone", "node stops", "store stops", "no room"))
    world.trace.add("trouble:", what)
    faults.seen[what] += 1
    match what:
        case "node gone":
            world.runtime.fail_node(is_down=True)
        case "no room":
            faults.is_full = True
        case _:
            faults.moving[what.split()[0]].clear()
    try:
        await asyncio.sleep(dice.random() * 5)
    finally:
        faults.is_full = False
        for event in faults.moving.values():
            event.set()
        world.runtime.fail_node(is_down=False)


async def _stop(world: FaultyWorld, clients: Storm, succeeded: list[bool]) -> None:
    """Stop the leader for a while; record each time whether another led meanwhile."""
    dice = random.Random(world.seed * 17 + 3)
    while True:
        await asyncio.sleep(2 + dice.random() * 4)
        clients.jump(dice.choice(JUMPS))
        leading = [plane for plane in world.planes if plane.leads]
        assert len(leading) <= 1
        for plane in leading:
            # Within its lease, beyond its renewal deadline, and beyond the whole lease.
            seconds = dice.choice((6, 12, 25, 40))
            world.trace.add("trouble: the leader stops for", seconds)
            plane.process.stop()
            try:
                await asyncio.sleep(seconds / 2)
                clients.jump(dice.choice(JUMPS))
                await asyncio.sleep(seconds / 2)
                succeeded.append(any(other.leads for other in world.planes))
            finally:
                plane.process.resume()


async def _stop_leader(world: FaultyWorld) -> None:
    dice = random.Random(world.seed)
    while True:
        await asyncio.sleep(4 + dice.random() * 8)
        leading = [plane for plane in world.planes if plane.leads]
        assert len(leading) <= 1
        if leading:
            await world.replace(leading[0])
