"""What a pause does when requests wait for the sandbox, and what a restart runs again."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
from msgspec import structs

from paddock.claims.requests import NewSandbox
from paddock.controllers.sandbox.controller import REASON_START_FAILED
from paddock.controllers.sandbox.pauses import REASON_NOT_HIBERNATED
from paddock.kit.errors import DeadlineExceededError, UnavailableError
from paddock.resources.kinds.builtin import Event
from paddock.resources.kinds.sandbox import Phase, Sandbox
from paddock.resources.kinds.template import PauseStrategy
from paddock.runtime.port import InstanceState
from paddock.runtime.simulated import Operation
from tests.scenario.paddock import CALLER, World, paddock

pytestmark = pytest.mark.looptime


class Subject:
    """A sandbox that hibernates, and requests that wait for it."""

    def __init__(self, world: World, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
        assert sandbox.spec.claim is not None
        self.world = world
        self.key, self.uid = sandbox.key, sandbox.metadata.uid
        self.id = sandbox.spec.claim.sandbox_id
        self.has_requests = False
        self.phases: list[Phase] = []
        monkeypatch.setattr(world.plane.gateways, "has_requests", self._has_requests)

    async def _has_requests(self, sandbox: Sandbox) -> bool:
        assert sandbox.metadata.uid == self.uid
        self.phases.append(sandbox.status.phase)
        return self.has_requests

    @property
    def sandbox(self) -> Sandbox:
        found = self.world.provider.sandbox(self.key)
        assert found is not None
        return found

    async def state(self) -> InstanceState:
        instance = await self.world.runtime.inspect(self.uid)
        assert instance is not None
        return instance.state

    async def pause(self, *, memory: bool = True) -> Sandbox:
        return await self.world.manager.lifecycle.pause(CALLER, self.id, memory=memory)

    async def connect(self) -> Sandbox:
        woken, _ = await self.world.manager.lifecycle.connect(CALLER, self.id, timeout_seconds=60)
        return woken

    async def events(self) -> set[str]:
        listed = await self.world.store.list(Event)
        return {event.reason for event in listed.items}


@asynccontextmanager
async def hibernating(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Subject]:
    async with paddock(pool_size=1) as world:
        sandbox = await world.manager.claims.create(CALLER, NewSandbox(template="base"))
        spec = structs.replace(sandbox.spec, pause_strategy=PauseStrategy.HIBERNATE)
        await world.provider.write.mutate(
            Sandbox,
            sandbox.key,
            lambda current: structs.replace(current, spec=spec),
            uid=sandbox.metadata.uid,
            attempts=10,
        )
        yield Subject(world, sandbox, monkeypatch)


async def test_a_sandbox_with_waiting_requests_is_only_frozen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with hibernating(monkeypatch) as subject:
        before = subject.sandbox.status.incarnation
        subject.has_requests = True
        paused = await subject.pause()
        assert paused.status.phase is Phase.PAUSED
        # Gateways are asked after they can know of the pause.
        assert subject.phases[0] is Phase.PAUSING
        assert await subject.state() is InstanceState.FROZEN
        woken = await subject.connect()
        assert woken.status.incarnation == before
        assert subject.world.runtime.calls[Operation.HIBERNATE] == 0


async def test_a_frozen_sandbox_hibernates_once_no_request_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with hibernating(monkeypatch) as subject:
        subject.has_requests = True
        await subject.pause()
        await asyncio.sleep(30)
        assert await subject.state() is InstanceState.FROZEN
        subject.has_requests = False
        await subject.world.until(
            lambda: subject.sandbox.status.pause_strategy is PauseStrategy.HIBERNATE
        )
        assert await subject.state() is InstanceState.HIBERNATED
        assert subject.sandbox.status.phase is Phase.PAUSED
        assert (await subject.connect()).status.phase is Phase.RUNNING


async def test_a_sandbox_that_cannot_hibernate_stays_frozen_with_an_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with hibernating(monkeypatch) as subject:
        subject.has_requests = True
        await subject.pause()
        for _ in range(20):
            subject.world.runtime.fail_next(
                Operation.HIBERNATE, UnavailableError("no space left"), uid=subject.uid
            )
        subject.has_requests = False
        await asyncio.sleep(120)
        assert REASON_NOT_HIBERNATED in await subject.events()
        assert await subject.state() is InstanceState.FROZEN
        assert (await subject.connect()).status.phase is Phase.RUNNING


async def test_a_sandbox_is_frozen_while_its_hibernation_waits_for_its_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with hibernating(monkeypatch) as subject:
        subject.world.runtime.set_busy(is_busy=True)
        paused = await subject.pause()
        assert paused.status.phase is Phase.PAUSED
        assert paused.status.pause_strategy is PauseStrategy.FREEZE
        await asyncio.sleep(30)
        assert await subject.state() is InstanceState.FROZEN
        subject.world.runtime.set_busy(is_busy=False)
        await subject.world.until(
            lambda: subject.sandbox.status.pause_strategy is PauseStrategy.HIBERNATE
        )
        assert await subject.state() is InstanceState.HIBERNATED
        assert REASON_NOT_HIBERNATED not in await subject.events()


async def test_a_sandbox_whose_hibernation_waits_is_thawed_when_it_is_resumed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with hibernating(monkeypatch) as subject:
        before = subject.sandbox.status.incarnation
        subject.world.runtime.set_busy(is_busy=True)
        await subject.pause()
        await asyncio.sleep(5)
        began = asyncio.get_running_loop().time()
        woken = await subject.connect()
        assert asyncio.get_running_loop().time() - began < 1
        assert woken.status.phase is Phase.RUNNING
        assert woken.status.incarnation == before  # the same processes
        assert await subject.state() is InstanceState.RUNNING
        # The attempt that was ended does not hibernate it later.
        subject.world.runtime.set_busy(is_busy=False)
        await asyncio.sleep(5)
        assert await subject.state() is InstanceState.RUNNING


async def test_a_sandbox_whose_hibernation_waits_is_deleted_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with hibernating(monkeypatch) as subject:
        subject.world.runtime.set_busy(is_busy=True)
        await subject.pause()
        await asyncio.sleep(5)
        await subject.world.manager.lifecycle.kill(CALLER, subject.id)
        await asyncio.sleep(1)
        assert await subject.world.runtime.inspect(subject.uid) is None


async def test_a_restarted_sandbox_runs_its_start_command_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with hibernating(monkeypatch) as subject:
        await subject.pause(memory=False)
        assert await subject.state() is InstanceState.STOPPED
        before = subject.world.runtime.calls[Operation.START]
        await subject.connect()
        assert subject.world.runtime.calls[Operation.START] > before


async def test_a_restarted_sandbox_whose_start_command_fails_keeps_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with hibernating(monkeypatch) as subject:
        await subject.pause(memory=False)
        subject.world.runtime.fail_next(
            Operation.START, DeadlineExceededError("not ready within 5 s"), uid=subject.uid
        )
        assert (await subject.connect()).status.phase is Phase.RUNNING
        await asyncio.sleep(5)
        assert REASON_START_FAILED in await subject.events()
