"""The next step for a sandbox, for every spec and instance state."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from msgspec import structs

from paddock.controllers.sandbox import plan as steps
from paddock.controllers.sandbox.lifecycle import TRANSITIONS, Trigger, move
from paddock.resources.kinds.sandbox import (
    CONDITION_READY,
    FINALIZER_SANDBOX,
    ClaimIdentity,
    Phase,
    Sandbox,
    SandboxSpec,
    SandboxStatus,
)
from paddock.resources.kinds.template import PauseStrategy
from paddock.resources.meta import Condition, ConditionStatus, ObjectMeta
from paddock.runtime.port import Instance, InstanceState

NOW = datetime(2030, 1, 1, tzinfo=UTC)
PAST, FUTURE = NOW - timedelta(seconds=60), NOW + timedelta(seconds=60)
READY = Condition(type=CONDITION_READY, status=ConditionStatus.TRUE, reason="Running")


def sandbox(phase: Phase, **spec: Any) -> Sandbox:
    return Sandbox(
        metadata=ObjectMeta(name="a", namespace="default", finalizers=(FINALIZER_SANDBOX,)),
        spec=SandboxSpec(**spec),
        status=SandboxStatus(phase=phase, conditions=(READY,), incarnation=1),
    )


def instance(state: InstanceState, incarnation: int = 1, reason: str = "") -> Instance:
    return Instance(uid="u", state=state, incarnation=incarnation, reason=reason)


def claim(**changes: Any) -> ClaimIdentity:
    known = ClaimIdentity(
        sandbox_id="i", owner="default", lock="l", claim_time=NOW, template_id="base"
    )
    return structs.replace(known, **changes)


def imaged(instance: Instance, image: str) -> Instance:
    return structs.replace(instance, image=image)


def shown(sandbox: Sandbox, image: str) -> Sandbox:
    return structs.replace(sandbox, status=structs.replace(sandbox.status, image=image))


RUNS = instance(InstanceState.RUNNING)
FROZEN = instance(InstanceState.FROZEN)


@pytest.mark.parametrize(
    ("given", "found", "expected"),
    [
        pytest.param(sandbox(Phase.PENDING), None, steps.Create(), id="new: made"),
        pytest.param(
            shown(sandbox(Phase.RUNNING, image="b"), "a"),
            imaged(RUNS, "a"),
            steps.UpdateImage("b"),
            id="another image: replaced",
        ),
        pytest.param(
            shown(sandbox(Phase.RUNNING, image="b"), "a"),
            imaged(instance(InstanceState.CREATING, 2), "b"),
            steps.UpdateImage("b"),
            id="another image, being started: waited for",
        ),
        pytest.param(
            shown(sandbox(Phase.RUNNING, image="b"), "a"),
            imaged(instance(InstanceState.RUNNING, 2), "b"),
            steps.UpdateImage("b"),
            id="another image, not known to be ready: waited for",
        ),
        pytest.param(
            shown(sandbox(Phase.RUNNING, image="b"), "b"),
            imaged(RUNS, "b"),
            steps.Wait(None, "the sandbox runs"),
            id="its own image: nothing to do",
        ),
        pytest.param(
            shown(sandbox(Phase.RUNNING, image="b"), "a"),
            imaged(instance(InstanceState.FAILED, reason="no image"), "b"),
            steps.Fail("no image"),
            id="another image that cannot be started",
        ),
        pytest.param(
            sandbox(Phase.PAUSED, image="b"),
            imaged(FROZEN, "a"),
            steps.Resume(PauseStrategy.FREEZE),
            id="another image while it is paused: runs first",
        ),
        pytest.param(
            sandbox(Phase.PENDING),
            instance(InstanceState.FAILED, reason="no image"),
            steps.Fail("no image"),
            id="cannot be made",
        ),
        pytest.param(
            sandbox(Phase.RUNNING), RUNS, steps.Wait(None, "the sandbox runs"), id="all is well"
        ),
        pytest.param(
            sandbox(Phase.RUNNING, shutdown_time=FUTURE),
            RUNS,
            steps.Wait(FUTURE, "the sandbox runs"),
            id="called again at its end",
        ),
        pytest.param(
            sandbox(Phase.RUNNING, shutdown_time=FUTURE, pause_time=NOW + timedelta(seconds=5)),
            RUNS,
            steps.Wait(NOW + timedelta(seconds=5), "the sandbox runs"),
            id="called again at the earlier of two",
        ),
        pytest.param(
            sandbox(Phase.RUNNING),
            None,
            steps.Fail("the instance no longer exists in the runtime"),
            id="vanished",
        ),
        pytest.param(
            sandbox(Phase.RUNNING),
            instance(InstanceState.RUNNING, incarnation=2),
            steps.RecordRunning(),
            id="a new life has new addresses",
        ),
        pytest.param(
            sandbox(Phase.RUNNING, paused=True),
            RUNS,
            steps.Pause(PauseStrategy.FREEZE),
            id="told to pause",
        ),
        pytest.param(
            sandbox(Phase.RUNNING, paused=True, pause_strategy=PauseStrategy.HIBERNATE),
            RUNS,
            steps.Pause(PauseStrategy.HIBERNATE),
            id="told to pause in a manner",
        ),
        pytest.param(
            sandbox(Phase.PAUSED, paused=True, shutdown_time=FUTURE),
            FROZEN,
            steps.Wait(FUTURE, "the sandbox is paused"),
            id="kept until its retention ends",
        ),
        pytest.param(
            sandbox(Phase.PAUSED, paused=True, pause_strategy=PauseStrategy.STOP),
            FROZEN,
            steps.Wait(None, "the sandbox is paused"),
            id="paused otherwise than asked now: stays",
        ),
        pytest.param(
            sandbox(Phase.PAUSED, paused=True, pause_strategy=PauseStrategy.HIBERNATE),
            FROZEN,
            steps.HibernateFrozen(),
            id="frozen for the sake of waiting requests",
        ),
        pytest.param(
            sandbox(Phase.RUNNING, paused=True),
            FROZEN,
            steps.Pause(PauseStrategy.FREEZE),
            id="frozen before a crash could be written: told again",
        ),
        pytest.param(
            sandbox(Phase.PAUSED),
            FROZEN,
            steps.Resume(PauseStrategy.FREEZE),
            id="told to go on",
        ),
        pytest.param(
            sandbox(Phase.RESUMING),
            instance(InstanceState.HIBERNATED),
            steps.Resume(PauseStrategy.HIBERNATE),
            id="told to go on, by what is there",
        ),
        pytest.param(
            sandbox(Phase.RESUMING), RUNS, steps.RecordRunning(), id="went on before a crash"
        ),
        pytest.param(
            sandbox(Phase.RUNNING, pause_time=PAST, claim=claim(auto_pause=True)),
            RUNS,
            steps.AutoPause(),
            id="its pause is due",
        ),
        pytest.param(
            sandbox(Phase.RUNNING, shutdown_time=PAST), RUNS, steps.Expire(), id="its end is due"
        ),
        pytest.param(
            sandbox(Phase.RUNNING, pause_time=PAST, shutdown_time=PAST),
            RUNS,
            steps.AutoPause(),
            id="both are due, after a downtime: paused, and nothing is lost",
        ),
        pytest.param(
            sandbox(Phase.PAUSED, paused=True, shutdown_time=PAST),
            FROZEN,
            steps.Expire(),
            id="its retention has expired",
        ),
        pytest.param(
            sandbox(Phase.RESUMING, shutdown_time=PAST),
            FROZEN,
            steps.Resume(PauseStrategy.FREEZE),
            id="on its way back: its timeout is for running",
        ),
        pytest.param(sandbox(Phase.RUNNING, recycle=True), RUNS, steps.Recycle(), id="given back"),
        pytest.param(
            sandbox(Phase.RECYCLING, recycle=True), RUNS, steps.Recycle(), id="reset cut off"
        ),
        pytest.param(
            sandbox(Phase.RECYCLING, recycle=True), None, steps.Recycle(), id="between two lives"
        ),
        pytest.param(
            sandbox(Phase.RECYCLING, recycle=True),
            instance(InstanceState.FAILED, reason="killed"),
            steps.Recycle(),
            id="its end is ours",
        ),
        pytest.param(
            sandbox(Phase.FAILED),
            RUNS,
            steps.Wait(None, "the sandbox is Failed"),
            id="failed stays so",
        ),
        pytest.param(
            sandbox(Phase.FAILED, shutdown_time=PAST), None, steps.Expire(), id="failed, and due"
        ),
    ],
)
def test_the_next_step(given: Sandbox, found: Instance | None, expected: steps.Step) -> None:
    assert steps.plan(given, found, now=NOW) == expected


def test_nothing_is_created_before_the_finalizer_is_set() -> None:
    bare = structs.replace(
        sandbox(Phase.PENDING), metadata=ObjectMeta(name="a", namespace="default")
    )
    assert steps.plan(bare, None, now=NOW) == steps.AddFinalizer()


@pytest.mark.parametrize("phase", list(Phase))
def test_deletion_wins_over_everything(phase: Phase) -> None:
    going = sandbox(phase, paused=True, shutdown_time=PAST)
    meta = structs.replace(going.metadata, deletion_timestamp=NOW)
    assert steps.plan(structs.replace(going, metadata=meta), RUNS, now=NOW) == steps.Destroy()
    freed = structs.replace(meta, finalizers=("someone.else/finalizer",))
    rest = steps.plan(structs.replace(going, metadata=freed), RUNS, now=NOW)
    assert isinstance(rest, steps.Wait)


def test_a_transition_that_is_not_in_the_table_is_refused() -> None:
    assert move(Phase.RUNNING, Trigger.PAUSED) is Phase.PAUSED
    with pytest.raises(ValueError, match="no transition"):
        move(Phase.FAILED, Trigger.RESUMED)


def test_every_phase_can_be_reached_and_left_for_good() -> None:
    reached = {Phase.PENDING} | set(TRANSITIONS.values())
    assert reached == set(Phase)
    assert all((phase, Trigger.DELETED) in TRANSITIONS for phase in Phase)
