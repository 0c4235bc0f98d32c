"""Slow restores of one team do not occupy the control plane: another team's resume is served."""

import asyncio

import pytest

from paddock.app.wiring.controllers import CHECKPOINT_WORKERS, SANDBOX_WORKERS
from paddock.claims.caller import Caller, Role
from paddock.claims.requests import NewSandbox
from paddock.kit.clock import LoopClock
from paddock.resources.kinds.sandbox import Phase, Sandbox
from paddock.runtime.port import Instance, StoredCheckpoint
from paddock.runtime.simulated import Operation, SimulatedRuntime
from tests.scenario.paddock import World, paddock

pytestmark = pytest.mark.looptime

SLOW = Caller("slow", "", Role.MEMBER)
OTHER = Caller("other", "", Role.MEMBER)
SLOW_SECONDS = 60.0


class SlowForOneTeam(SimulatedRuntime):
    """A runtime in which what is heavy takes a minute for the sandboxes of one team."""

    def __init__(self) -> None:
        super().__init__(clock=LoopClock())
        self.set_latency(Operation.HIBERNATE, 0.01)

    async def restore(self, uid: str) -> Instance:
        await self._wait(uid)
        return await super().restore(uid)

    async def snapshot(
        self, uid: str, checkpoint_id: str, *, memory: bool, keep_running: bool
    ) -> StoredCheckpoint:
        await self._wait(uid)
        return await super().snapshot(uid, checkpoint_id, memory=memory, keep_running=keep_running)

    async def _wait(self, uid: str) -> None:
        if self._get(uid).agent.team == SLOW.team:
            await asyncio.sleep(SLOW_SECONDS)


async def _create(world: World, caller: Caller, count: int) -> list[str]:
    wanted = NewSandbox(template="base", timeout_seconds=3600)
    made: list[Sandbox] = await asyncio.gather(
        *(world.manager.claims.create(caller, wanted) for _ in range(count))
    )
    # Warm sandboxes of a shared pool are in its namespace, whichever team has them.
    assert {sandbox.metadata.namespace for sandbox in made} == {"default"}
    return [sandbox.spec.claim.sandbox_id for sandbox in made if sandbox.spec.claim]


async def _pause(world: World, caller: Caller, ids: list[str]) -> None:
    await asyncio.gather(*(world.manager.lifecycle.pause(caller, one, memory=False) for one in ids))


def _now() -> float:
    return asyncio.get_running_loop().time()


async def test_another_teams_resume_is_served_while_one_teams_restores_hang() -> None:
    async with paddock(pool_size=0, runtime=SlowForOneTeam()) as world:
        slow = await _create(world, SLOW, SANDBOX_WORKERS + 20)
        mine = await _create(world, OTHER, 1)
        await _pause(world, SLOW, slow)
        await _pause(world, OTHER, mine)
        resumes = [
            asyncio.create_task(world.manager.lifecycle.resume(SLOW, one, timeout_seconds=3600))
            for one in slow
        ]
        await asyncio.sleep(1)
        before = _now()
        resumed = await world.manager.lifecycle.resume(OTHER, mine[0], timeout_seconds=3600)
        assert resumed.status.phase is Phase.RUNNING
        assert _now() - before < 1
        # The slow ones are served, too, and do not wait for each other for long.
        for done in await asyncio.gather(*resumes):
            assert done.status.phase is Phase.RUNNING
        assert _now() - before < SLOW_SECONDS + 30


async def test_another_teams_snapshot_is_taken_while_one_teams_dumps_hang() -> None:
    async with paddock(pool_size=0, runtime=SlowForOneTeam()) as world:
        slow = await _create(world, SLOW, CHECKPOINT_WORKERS + 4)
        mine = await _create(world, OTHER, 1)
        dumps = [
            asyncio.create_task(world.manager.snapshots.create(SLOW, one, name=None))
            for one in slow
        ]
        await asyncio.sleep(1)
        before = _now()
        await world.manager.snapshots.create(OTHER, mine[0], name=None)
        assert _now() - before < 1
        await asyncio.gather(*dumps)
