"""Sandboxes that cannot hibernate, or not be paused at all: state, quota, deadlines and retries."""

import asyncio
import itertools
import random
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta

import pytest
from msgspec import structs

from paddock.claims.quota.ledger import Dimension, Quota, QuotaLimit, QuotaScope
from paddock.claims.requests import NewSandbox
from paddock.controllers.sandbox import hibernation_retry
from paddock.controllers.sandbox.pauses import (
    REASON_ENDED,
    REASON_NOT_HIBERNATED,
    REASON_STOPPED,
    REASON_UNSTORABLE,
)
from paddock.kit.errors import (
    PaddockError,
    QuotaExceededError,
    UnavailableError,
    UnstorableError,
)
from paddock.resources.kinds.builtin import Event
from paddock.resources.kinds.sandbox import CONDITION_STORABLE, Phase, Sandbox
from paddock.resources.kinds.template import PauseStrategy
from paddock.resources.meta import condition
from paddock.runtime.local.node.rpc import RpcError
from paddock.runtime.port import Capabilities, InstanceState
from paddock.runtime.simulated import ALL_CAPABILITIES, Operation, SimulatedRuntime
from tests.scenario.paddock import CALLER, World, paddock

pytestmark = pytest.mark.looptime

NO_FREEZE = structs.replace(ALL_CAPABILITIES, can_freeze=False)
ONLY_HIBERNATE = structs.replace(ALL_CAPABILITIES, can_freeze=False, can_stop=False)
PAUSE_BUDGET = timedelta(seconds=60)
"""How long a pause may be retried, at most."""


class Subject:
    """A sandbox that hibernates."""

    def __init__(self, world: World, sandbox: Sandbox) -> None:
        assert sandbox.spec.claim is not None
        self.world = world
        self.key, self.uid = sandbox.key, sandbox.metadata.uid
        self.id = sandbox.spec.claim.sandbox_id
        self.lock = sandbox.spec.claim.lock

    @property
    def now(self) -> datetime:
        return self.world.plane.clock.now()

    @property
    def sandbox(self) -> Sandbox:
        found = self.world.provider.sandbox(self.key)
        assert found is not None
        return found

    @property
    def is_gone(self) -> bool:
        return self.world.provider.sandbox(self.key) is None

    @property
    def running_count(self) -> int:
        """How many sandboxes the quota of the team counts as running."""
        return self.world.plane.ledger.used("team:default", Dimension.COUNT, QuotaScope.RUNNING)

    async def state(self) -> InstanceState | None:
        instance = await self.world.runtime.inspect(self.uid)
        return None if instance is None else instance.state

    async def shown(self) -> str:
        """Return the state that the API shows for it."""
        detail = await self.world.http.get(f"/sandboxes/{self.id}")
        return detail.json()["state"]

    async def listed(self) -> dict[str, int]:
        """Return how often lists by state contain it, and the number of running ones."""
        running = await self.world.http.get("/v2/sandboxes", params={"state": "running"})
        paused = await self.world.http.get("/v2/sandboxes", params={"state": "paused"})
        return {
            "running": len(running.json()),
            "paused": len(paused.json()),
            "total": int(running.headers["X-Total-Running"]),
        }

    async def pause(self) -> Sandbox:
        return await self.world.manager.lifecycle.pause(CALLER, self.id)

    async def resume(self, seconds: int = 600) -> Sandbox:
        return await self.world.manager.lifecycle.resume(CALLER, self.id, timeout_seconds=seconds)

    async def events(self, reason: str) -> list[str]:
        await asyncio.sleep(1)
        listed = await self.world.store.list(Event)
        return [event.message for event in listed.items if event.reason == reason]

    def dumps(self) -> int:
        return self.world.runtime.calls[Operation.HIBERNATE]


@asynccontextmanager
async def hibernating(
    *,
    capabilities: Capabilities = ALL_CAPABILITIES,
    timeout_seconds: int | None = 400,
    auto_pause: bool = False,
) -> AsyncGenerator[Subject]:
    runtime = SimulatedRuntime(capabilities=capabilities)
    async with paddock(pool_size=0, runtime=runtime) as world:
        wanted = NewSandbox(
            template="base",
            timeout_seconds=timeout_seconds,
            auto_pause=auto_pause,
            pause_strategy=PauseStrategy.HIBERNATE,
        )
        yield Subject(world, await world.manager.claims.create(CALLER, wanted))


# ---- it is frozen instead ----------------------------------------------------------------


async def test_a_sandbox_that_cannot_be_stored_is_frozen_with_the_reason() -> None:
    async with hibernating() as subject:
        subject.world.runtime.set_unstorable(subject.uid, "process 7 (sleep) is traced")
        paused = await subject.pause()
        assert paused.status.phase is Phase.PAUSED
        assert paused.status.pause_strategy is PauseStrategy.FREEZE
        assert await subject.state() is InstanceState.FROZEN
        assert await subject.shown() == "paused"
        found = condition(paused.status.conditions, CONDITION_STORABLE)
        assert found is not None
        assert (found.status, found.reason) == ("False", REASON_UNSTORABLE)
        assert "process 7 (sleep) is traced" in found.message
        [event] = await subject.events(REASON_NOT_HIBERNATED)
        assert "(1)" in event
        assert "process 7 (sleep) is traced" in event


async def test_it_counts_and_is_shown_as_running_until_it_is_frozen() -> None:
    async with hibernating() as subject:
        runtime = subject.world.runtime
        limit = QuotaLimit(Dimension.COUNT, QuotaScope.RUNNING, 1)
        await subject.world.plane.keyring.set_team_quota("default", Quota((limit,)))
        runtime.set_unstorable(subject.uid)
        runtime.set_latency(Operation.HIBERNATE, 5)
        runtime.set_latency(Operation.FREEZE, 5)
        end = (await subject.world.http.get(f"/sandboxes/{subject.id}")).json()["endAt"]
        pause = asyncio.ensure_future(subject.pause())
        for _ in range(9):
            await asyncio.sleep(1)
            assert await subject.state() is InstanceState.RUNNING
            assert subject.running_count == 1
            assert await subject.listed() == {"running": 1, "paused": 0, "total": 1}
            detail = (await subject.world.http.get(f"/sandboxes/{subject.id}")).json()
            assert (detail["state"], detail["endAt"]) == ("running", end)
            with pytest.raises(QuotaExceededError):
                await subject.world.manager.claims.create(CALLER, NewSandbox(template="base"))
        await pause
        assert subject.running_count == 0
        assert await subject.listed() == {"running": 0, "paused": 1, "total": 0}
        await subject.world.manager.claims.create(CALLER, NewSandbox(template="base"))
        with pytest.raises(QuotaExceededError):
            await subject.resume()


async def test_a_refused_pause_never_leaves_the_quota() -> None:
    async with hibernating(capabilities=NO_FREEZE) as subject:
        limit = QuotaLimit(Dimension.COUNT, QuotaScope.RUNNING, 1)
        await subject.world.plane.keyring.set_team_quota("default", Quota((limit,)))
        subject.world.runtime.set_unstorable(subject.uid)

        async def others() -> None:
            while True:
                with pytest.raises(QuotaExceededError):
                    await subject.world.manager.claims.create(CALLER, NewSandbox(template="base"))
                await asyncio.sleep(0.001)

        attempts = asyncio.ensure_future(others())
        for _ in range(5):
            with pytest.raises(UnavailableError, match="is traced"):
                await subject.pause()
        assert not attempts.done()
        attempts.cancel()
        assert subject.running_count == 1


# ---- retries -----------------------------------------------------------------------------


async def test_what_cannot_be_stored_is_not_tried_again_while_it_is_frozen() -> None:
    async with hibernating() as subject:
        subject.world.runtime.set_unstorable(subject.uid)
        await subject.pause()
        for _ in range(20):
            # Any change of the object starts a reconcile.
            await subject.world.provider.write.mutate(
                Sandbox,
                subject.key,
                lambda current: structs.replace(
                    current,
                    metadata=structs.replace(
                        current.metadata, annotations={"at": str(subject.now)}
                    ),
                ),
                uid=subject.uid,
            )
            await asyncio.sleep(600)
        assert subject.dumps() == 1
        assert await subject.state() is InstanceState.FROZEN


async def test_errors_that_may_pass_are_retried_with_a_backoff_a_few_times() -> None:
    async with hibernating() as subject:
        for _ in range(100):
            subject.world.runtime.fail_next(
                Operation.HIBERNATE, UnavailableError("no space left"), uid=subject.uid
            )
        await subject.pause()
        assert await subject.state() is InstanceState.FROZEN
        times = []
        for _ in range(1800):
            before = subject.dumps()
            await asyncio.sleep(1)
            times += [subject.now] * (subject.dumps() - before)
        assert subject.dumps() == hibernation_retry.ATTEMPTS
        gaps = [(after - at).total_seconds() for at, after in itertools.pairwise(times)]
        assert gaps == sorted(gaps)
        events = await subject.events(REASON_NOT_HIBERNATED)
        assert len(events) == hibernation_retry.ATTEMPTS
        assert all("no space left" in event for event in events)
        failures = subject.sandbox.status.hibernation_failures
        assert failures is not None
        assert (failures.count, failures.is_final) == (hibernation_retry.ATTEMPTS, True)


async def test_a_frozen_sandbox_hibernates_once_the_error_has_passed() -> None:
    async with hibernating() as subject:
        subject.world.runtime.fail_next(Operation.HIBERNATE, uid=subject.uid)
        await subject.pause()
        assert await subject.state() is InstanceState.FROZEN
        await asyncio.sleep(hibernation_retry.FIRST_SECONDS + 1)
        assert await subject.state() is InstanceState.HIBERNATED
        status = subject.sandbox.status
        assert status.hibernation_failures is None
        found = condition(status.conditions, CONDITION_STORABLE)
        assert found is not None
        assert found.status == "True"
        assert (await subject.resume()).status.phase is Phase.RUNNING


async def test_many_pauses_of_an_unstorable_sandbox_attempt_few_dumps() -> None:
    async with hibernating() as subject:
        subject.world.runtime.set_unstorable(subject.uid)
        for _ in range(200):
            await subject.pause()
            await subject.resume()
            await asyncio.sleep(1)
        # In some 200 s: at 0, 10, 40 and 130 s.
        assert subject.dumps() == 4
        subject.world.runtime.set_unstorable(subject.uid, None)
        await asyncio.sleep(hibernation_retry.MAX_SECONDS / 10)
        await subject.pause()
        assert await subject.state() is InstanceState.HIBERNATED


async def test_a_lost_reply_of_a_hibernation_is_no_failure_for_the_sandbox() -> None:
    async with hibernating() as subject:
        subject.world.runtime.lose_reply_next(Operation.HIBERNATE, uid=subject.uid)
        paused = await subject.pause()
        assert paused.status.pause_strategy is PauseStrategy.HIBERNATE
        assert await subject.state() is InstanceState.HIBERNATED
        assert paused.status.hibernation_failures is None


# ---- deadlines ---------------------------------------------------------------------------


@pytest.mark.parametrize("auto_pause", [False, True])
async def test_a_refused_pause_keeps_the_deadline(auto_pause) -> None:
    async with hibernating(capabilities=NO_FREEZE, auto_pause=auto_pause) as subject:
        subject.world.runtime.set_unstorable(subject.uid)
        before = subject.sandbox.spec
        await asyncio.sleep(100)
        for _ in range(3):
            with pytest.raises(UnavailableError):
                await subject.pause()
            await asyncio.sleep(1)
            spec = subject.sandbox.spec
            assert not spec.paused
            assert (spec.pause_time, spec.shutdown_time) == (
                before.pause_time,
                before.shutdown_time,
            )
            assert spec.before_pause is None


async def test_a_refused_pause_of_a_sandbox_without_a_timeout_sets_none() -> None:
    async with hibernating(capabilities=NO_FREEZE, timeout_seconds=None) as subject:
        subject.world.runtime.set_unstorable(subject.uid)
        with pytest.raises(UnavailableError):
            await subject.pause()
        await asyncio.sleep(1)
        spec = subject.sandbox.spec
        assert (spec.pause_time, spec.shutdown_time) == (None, None)


async def test_a_sandbox_whose_deadline_passes_during_a_failing_pause_ends() -> None:
    async with hibernating(capabilities=NO_FREEZE, timeout_seconds=60) as subject:
        for _ in range(100):
            subject.world.runtime.fail_next(Operation.HIBERNATE, uid=subject.uid)
        await asyncio.sleep(55)
        with pytest.raises(PaddockError):
            await subject.pause()
        await asyncio.sleep(PAUSE_BUDGET.total_seconds())
        assert subject.is_gone
        assert await subject.state() is None


async def test_a_timeout_whose_pause_cannot_be_stored_freezes() -> None:
    async with hibernating(timeout_seconds=60, auto_pause=True) as subject:
        subject.world.runtime.set_unstorable(subject.uid)
        await asyncio.sleep(62)
        assert subject.sandbox.status.phase is Phase.PAUSED
        assert await subject.state() is InstanceState.FROZEN
        assert subject.running_count == 0


async def test_a_timeout_without_any_pause_that_keeps_memory_stops() -> None:
    async with hibernating(capabilities=NO_FREEZE, timeout_seconds=60, auto_pause=True) as subject:
        subject.world.runtime.set_unstorable(subject.uid)
        subject.world.runtime.files(subject.uid)["a"] = "kept"
        await asyncio.sleep(62)
        assert await subject.state() is InstanceState.STOPPED
        assert subject.sandbox.status.pause_strategy is PauseStrategy.STOP
        assert subject.running_count == 0
        assert await subject.events(REASON_STOPPED)
        assert (await subject.resume()).status.phase is Phase.RUNNING
        assert subject.world.runtime.files(subject.uid) == {"a": "kept"}


async def test_a_timeout_without_any_pause_ends_the_sandbox() -> None:
    async with hibernating(
        capabilities=ONLY_HIBERNATE, timeout_seconds=60, auto_pause=True
    ) as subject:
        subject.world.runtime.set_unstorable(subject.uid)
        await asyncio.sleep(62)
        assert subject.is_gone
        assert subject.running_count == 0
        assert await subject.events(REASON_ENDED)


async def test_a_timeout_while_the_node_is_down_pauses_when_it_is_back() -> None:
    async with hibernating(timeout_seconds=60, auto_pause=True) as subject:
        subject.world.runtime.fail_node(is_down=True)
        await asyncio.sleep(600)
        assert subject.running_count == 1
        assert not subject.sandbox.is_deleting
        subject.world.runtime.fail_node(is_down=False)
        await asyncio.sleep(200)
        assert subject.sandbox.status.phase is Phase.PAUSED
        assert await subject.state() is InstanceState.HIBERNATED


async def test_a_slow_resume_gets_the_time_that_it_asked_for_and_no_more() -> None:
    async with hibernating(timeout_seconds=3600) as subject:
        await subject.pause()
        subject.world.runtime.set_latency(Operation.RESTORE, 30)
        await subject.resume(seconds=20)
        end = subject.sandbox.spec.shutdown_time
        assert end is not None
        assert end - subject.now <= timedelta(seconds=20)
        await asyncio.sleep(25)
        assert subject.is_gone


async def test_a_slow_wake_does_not_extend_a_declared_end() -> None:
    async with hibernating(timeout_seconds=3600) as subject:
        paused = await subject.pause()
        end = subject.now + timedelta(seconds=10)
        await subject.world.provider.write.mutate(
            Sandbox,
            subject.key,
            lambda current: structs.replace(
                current, spec=structs.replace(current.spec, shutdown_time=end)
            ),
            uid=subject.uid,
        )
        subject.world.runtime.set_latency(Operation.RESTORE, 30)
        wake = asyncio.ensure_future(subject.world.manager.lifecycle.wake(paused))
        await asyncio.sleep(35)
        assert subject.is_gone
        with pytest.raises(PaddockError):
            await wake


# ---- snapshots and forks -----------------------------------------------------------------


@pytest.mark.parametrize("call", ["snapshots", "fork"])
async def test_storing_an_unstorable_sandbox_is_a_conflict_with_the_reason(call) -> None:
    async with hibernating() as subject:
        subject.world.runtime.set_unstorable(subject.uid, "process 7 (sleep) is traced")
        began = subject.now
        response = await subject.world.http.post(f"/sandboxes/{subject.id}/{call}", json={})
        assert response.status_code == 409
        assert "process 7 (sleep) is traced" in response.text
        assert subject.now - began < timedelta(seconds=2)
        assert await subject.shown() == "running"


# ---- all at once -------------------------------------------------------------------------


class Chaos:
    """Random pauses, resumes and failures of one sandbox."""

    def __init__(self, subject: Subject, choose: random.Random) -> None:
        self.subject = subject
        self.runtime = subject.world.runtime
        self.choose = choose
        self.granted = subject.now + timedelta(seconds=120)
        """Until when it may run."""

    async def check(self) -> None:
        """Check a sandbox that runs: within its time, counted, and shown as running."""
        subject = self.subject
        if subject.is_gone or await subject.state() is not InstanceState.RUNNING:
            return
        sandbox = subject.sandbox
        if sandbox.is_deleting:
            return
        assert subject.now <= self.granted + PAUSE_BUDGET, sandbox
        assert subject.running_count == 1
        if sandbox.spec.paused:
            assert await subject.shown() == "running"

    async def check_for(self, seconds: float) -> None:
        for _ in range(int(seconds * 2)):
            await self.check()
            await asyncio.sleep(0.5)

    async def act(self) -> None:
        acts = (self.subject.pause, self.subject.pause, self.resume, self.damage, self.mend)
        await self.choose.choice(acts)()

    async def resume(self) -> None:
        seconds = self.choose.randint(1, 200)
        await self.subject.resume(seconds)
        # The timeout counts from the end of the resume.
        self.granted = max(self.granted, self.subject.now + timedelta(seconds=seconds))

    async def damage(self) -> None:
        if self.choose.random() < 0.5:
            self.runtime.set_unstorable(self.subject.uid)
        operation = self.choose.choice((Operation.HIBERNATE, Operation.FREEZE))
        for _ in range(self.choose.randint(1, 8)):
            self.runtime.fail_next(operation, uid=self.subject.uid)

    async def mend(self) -> None:
        self.runtime.set_unstorable(self.subject.uid, None)


@pytest.mark.parametrize("seed", range(12))
async def test_no_mix_of_pauses_and_failures_extends_a_life_or_hides_it(seed: int) -> None:
    """Whatever fails, a sandbox runs no longer than granted, and counts while it runs."""
    choose = random.Random(seed)
    capabilities = choose.choice((ALL_CAPABILITIES, NO_FREEZE, ONLY_HIBERNATE))
    auto_pause = choose.random() < 0.6
    async with hibernating(
        capabilities=capabilities, timeout_seconds=120, auto_pause=auto_pause
    ) as subject:
        chaos = Chaos(subject, choose)
        for _ in range(25):
            if subject.is_gone:
                break
            action = asyncio.ensure_future(chaos.act())
            await chaos.check_for(choose.randint(1, 30))
            while not action.done():
                await chaos.check_for(0.5)
            assert action.exception() is None or isinstance(action.exception(), PaddockError)
        await asyncio.sleep(max((chaos.granted - subject.now).total_seconds(), 0))
        await chaos.check_for(200)
        assert await subject.state() is not InstanceState.RUNNING
        assert subject.running_count == 0


def test_errors_of_unstorable_sandboxes_keep_their_class() -> None:
    """The node and other processes pass the error on by its name."""
    error = RpcError.of(UnstorableError("traced", hint="end it")).unpack()
    assert isinstance(error, UnstorableError)
    assert (error.message, error.hint) == ("traced", "end it")
