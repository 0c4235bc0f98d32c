"""The public state of a sandbox, and the actions it allows."""

from datetime import timedelta
from typing import Any

import pytest

from paddock.cache import states
from paddock.cache.states import SandboxState
from paddock.resources.kinds.sandbox import Phase
from paddock.resources.meta import with_meta
from tests.cache.make import EPOCH, identity, in_phase, sandbox

NOW = EPOCH
LATER = NOW + timedelta(seconds=1)
CLAIM = identity()


@pytest.mark.parametrize(
    ("given", "state", "reason"),
    [
        # in a pool
        ({"pool": "p", "phase": Phase.PENDING}, SandboxState.CREATING, "PooledButNotReady"),
        ({"pool": "p"}, SandboxState.AVAILABLE, "PooledAndReady"),
        ({"pool": "p", "ready": False}, SandboxState.CREATING, "PooledButNotReady"),
        ({"pool": "p", "phase": Phase.RECYCLING}, SandboxState.CREATING, "Recycling"),
        ({"pool": "p", "phase": Phase.FAILED}, SandboxState.DEAD, "Failed"),
        # claimed
        ({"claim": CLAIM, "phase": Phase.PENDING}, SandboxState.CREATING, "Pending"),
        ({"claim": CLAIM}, SandboxState.RUNNING, "Ready"),
        ({"claim": CLAIM, "pool": "p"}, SandboxState.RUNNING, "Ready"),
        ({"claim": CLAIM, "ready": False}, SandboxState.RUNNING, "NotReady"),
        ({"claim": CLAIM, "paused": True}, SandboxState.PAUSING, "Pausing"),
        ({"claim": CLAIM, "paused": True, "phase": Phase.PAUSING}, SandboxState.PAUSING, "Pausing"),
        ({"claim": CLAIM, "paused": True, "phase": Phase.PAUSED}, SandboxState.PAUSED, "Paused"),
        ({"claim": CLAIM, "phase": Phase.PAUSED}, SandboxState.PAUSED, "Resuming"),
        ({"claim": CLAIM, "phase": Phase.RESUMING}, SandboxState.PAUSED, "Resuming"),
        ({"claim": CLAIM, "phase": Phase.PAUSING}, SandboxState.PAUSING, "PausingThenResuming"),
        (
            {"claim": CLAIM, "paused": True, "phase": Phase.RESUMING},
            SandboxState.PAUSING,
            "Pausing",
        ),
        ({"claim": CLAIM, "recycle": True}, SandboxState.DEAD, "Recycling"),
        ({"claim": CLAIM, "phase": Phase.SUCCEEDED}, SandboxState.DEAD, "Succeeded"),
        ({"claim": CLAIM, "phase": Phase.FAILED}, SandboxState.DEAD, "Failed"),
        ({"claim": CLAIM, "phase": Phase.TERMINATING}, SandboxState.DEAD, "Terminating"),
        # created directly: neither pooled nor claimed
        ({}, SandboxState.RUNNING, "Ready"),
        # deadlines
        ({"claim": CLAIM, "shutdown_time": NOW}, SandboxState.DEAD, "ShutdownTimeReached"),
        ({"claim": CLAIM, "shutdown_time": LATER}, SandboxState.RUNNING, "Ready"),
        ({"pool": "p", "shutdown_time": NOW}, SandboxState.DEAD, "ShutdownTimeReached"),
        ({"claim": CLAIM, "shutdown_time": NOW, "pause_time": NOW}, SandboxState.RUNNING, "Ready"),
        (
            {"claim": CLAIM, "shutdown_time": NOW, "paused": True, "phase": Phase.PAUSED},
            SandboxState.DEAD,
            "ShutdownTimeReached",
        ),
    ],
)
def test_the_state_of_a_sandbox(given: dict[str, Any], state: SandboxState, reason: str) -> None:
    report = states.report(sandbox(**given), NOW)
    assert (report.state, report.reason) == (state, reason)


def test_a_deleting_sandbox_is_dead() -> None:
    for phase in Phase:
        dying = with_meta(sandbox(claim=CLAIM, phase=phase), deletion_timestamp=NOW)
        assert states.report(dying, NOW) == states.StateReport(SandboxState.DEAD, "Deleted")


def test_only_a_running_and_ready_sandbox_accepts_requests() -> None:
    ready = {
        (phase, paused)
        for phase in Phase
        for paused in (False, True)
        if states.report(sandbox(claim=CLAIM, phase=phase, paused=paused), NOW).is_ready
    }
    assert ready == {(Phase.RUNNING, False)}


def test_every_phase_and_flag_has_a_state_and_a_reason() -> None:
    for phase in Phase:
        for paused in (False, True):
            for claim in (None, CLAIM):
                for pool in (None, "p"):
                    box = sandbox(phase=phase, paused=paused, claim=claim, pool=pool)
                    report = states.report(box, NOW)
                    assert report.reason
                    assert states.state(box, NOW) is report.state


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"claim": CLAIM}, ""),
        ({}, ""),
        ({"claim": CLAIM, "paused": True}, ""),
        ({"claim": CLAIM, "paused": True, "phase": Phase.PAUSING}, ""),
        ({"claim": CLAIM, "paused": True, "phase": Phase.PAUSED}, ""),
        ({"claim": CLAIM, "ready": False}, "SandboxIsRunningButNotReady"),
        ({"claim": CLAIM, "phase": Phase.PENDING}, "SandboxPhaseNotAllowed"),
        ({"claim": CLAIM, "phase": Phase.FAILED}, "SandboxPhaseNotAllowed"),
        ({"claim": CLAIM, "phase": Phase.RESUMING}, "SandboxIsResuming"),
        ({"claim": CLAIM, "phase": Phase.PAUSED}, "SandboxIsResuming"),
        ({"claim": CLAIM, "phase": Phase.TERMINATING}, "SandboxIsTerminating"),
        ({"claim": CLAIM, "shutdown_time": NOW}, "ShutdownTimeReached"),
        ({"claim": CLAIM, "recycle": True}, "SandboxStateNotAllowed"),
        ({"pool": "p"}, "SandboxStateNotAllowed"),
        ({"pool": "p", "phase": Phase.PENDING}, "SandboxStateNotAllowed"),
    ],
)
def test_which_sandboxes_can_be_paused(given: dict[str, Any], reason: str) -> None:
    verdict = states.pausable(sandbox(**given), NOW)
    assert (bool(verdict), verdict.reason) == (not reason, reason)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"claim": CLAIM}, ""),
        ({"claim": CLAIM, "ready": False}, ""),
        ({"claim": CLAIM, "phase": Phase.RESUMING}, ""),
        ({"claim": CLAIM, "phase": Phase.PAUSED}, ""),
        ({"claim": CLAIM, "paused": True, "phase": Phase.PAUSED}, ""),
        ({"claim": CLAIM, "paused": True}, "SandboxIsPausing"),
        ({"claim": CLAIM, "paused": True, "phase": Phase.PAUSING}, "SandboxIsPausing"),
        ({"claim": CLAIM, "phase": Phase.PENDING}, "SandboxPhaseNotAllowed"),
        ({"claim": CLAIM, "phase": Phase.SUCCEEDED}, "SandboxPhaseNotAllowed"),
        ({"claim": CLAIM, "phase": Phase.TERMINATING}, "SandboxIsTerminating"),
        (
            {"claim": CLAIM, "paused": True, "phase": Phase.PAUSED, "shutdown_time": NOW},
            "ShutdownTimeReached",
        ),
        ({"pool": "p"}, "SandboxStateNotAllowed"),
    ],
)
def test_which_sandboxes_can_be_resumed(given: dict[str, Any], reason: str) -> None:
    verdict = states.resumable(sandbox(**given), NOW)
    assert (bool(verdict), verdict.reason) == (not reason, reason)


def test_an_incomplete_pause_is_not_paused() -> None:
    box = in_phase(sandbox(claim=CLAIM, paused=True), Phase.PAUSED)
    from msgspec import structs

    from paddock.resources.kinds.sandbox import CONDITION_PAUSED
    from paddock.resources.meta import Condition, ConditionStatus, set_condition

    half = Condition(type=CONDITION_PAUSED, status=ConditionStatus.FALSE, reason="Storing")
    conditions = set_condition(box.status.conditions, half, now=NOW)
    box = structs.replace(box, status=structs.replace(box.status, conditions=conditions))
    assert states.state(box, NOW) is SandboxState.PAUSING
    assert states.resumable(box, NOW).reason == "SandboxIsPausing"
