"""The next step of a SandboxClaim, and of a Checkpoint."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from msgspec import structs

from paddock.controllers.checkpoint import plan as storing
from paddock.controllers.claim import plan as claiming
from paddock.controllers.claim.progress import ClaimedSandboxes
from paddock.resources.kinds.checkpoint import (
    FINALIZER_CHECKPOINT,
    Checkpoint,
    CheckpointPhase,
    CheckpointSpec,
    CheckpointStatus,
    Content,
)
from paddock.resources.kinds.claim import (
    ClaimPhase,
    InplaceUpdate,
    SandboxClaim,
    SandboxClaimSpec,
    SandboxClaimStatus,
)
from paddock.resources.kinds.sandbox import Phase, Sandbox, SandboxStatus
from paddock.resources.kinds.template import PauseStrategy
from paddock.resources.meta import ObjectMeta

NOW = datetime(2030, 1, 1, tzinfo=UTC)
META = ObjectMeta(name="c", namespace="default")


def claim(status: SandboxClaimStatus | None = None, **spec: Any) -> SandboxClaim:
    begun = SandboxClaimStatus(claim_start_time=NOW)
    wanted = SandboxClaimSpec(**{"template_name": "base", "replicas": 10, **spec})
    return SandboxClaim(metadata=META, spec=wanted, status=status or begun)


def boxes(count: int, name: str) -> tuple[Sandbox, ...]:
    return tuple(
        Sandbox(metadata=ObjectMeta(name=f"{name}-{number}", namespace="default"))
        for number in range(count)
    )


def having(ready: int = 0, unsized: int = 0, coming: int = 0, lost: int = 0) -> ClaimedSandboxes:
    return ClaimedSandboxes(
        ready=boxes(ready, "ready"),
        unsized=boxes(unsized, "unsized"),
        coming=boxes(coming, "coming"),
        lost=boxes(lost, "lost"),
        until=NOW + timedelta(seconds=20) if unsized or coming else None,
    )


def completed(seconds_ago: float) -> SandboxClaimStatus:
    ended = NOW - timedelta(seconds=seconds_ago)
    return SandboxClaimStatus(phase=ClaimPhase.COMPLETED, completion_time=ended)


@pytest.mark.parametrize(
    ("given", "got", "expected"),
    [
        pytest.param(claim(SandboxClaimStatus()), 0, claiming.StartClaim(), id="begins"),
        pytest.param(claim(), 0, claiming.AcquireMore(5), id="a few at first"),
        pytest.param(claim(replicas=100), 20, claiming.AcquireMore(20), id="then twice as many"),
        pytest.param(
            claim(replicas=500), 200, claiming.AcquireMore(50), id="never too many at once"
        ),
        pytest.param(claim(replicas=3), 1, claiming.AcquireMore(2), id="no more than is missing"),
        pytest.param(
            claim(),
            10,
            claiming.FinishClaim("AllReplicasClaimed", "10 of 10 claimed"),
            id="has all",
        ),
        pytest.param(
            claim(SandboxClaimStatus(claim_start_time=NOW, claimed_replicas=10)),
            4,
            claiming.FinishClaim("AllReplicasClaimed", "10 of 10 claimed"),
            id="what was killed since still counts",
        ),
        pytest.param(
            claim(SandboxClaimStatus(claim_start_time=NOW - timedelta(seconds=61))),
            4,
            claiming.FinishClaim("TimeoutReached", "4 of 10 claimed in time", timed_out=True),
            id="its time is up: keeps what it has",
        ),
        pytest.param(
            claim(
                SandboxClaimStatus(
                    claim_start_time=NOW - timedelta(seconds=61),
                    message="0 more claimed; team default has 4 of 4",
                )
            ),
            4,
            claiming.FinishClaim(
                "TimeoutReached",
                "4 of 10 claimed in time; team default has 4 of 4",
                timed_out=True,
            ),
            id="its time is up: says why",
        ),
        pytest.param(
            claim(completed(10)), 0, claiming.Wait(NOW + timedelta(seconds=3590)), id="rests"
        ),
        pytest.param(claim(completed(3600)), 0, claiming.Expire(), id="its TTL has expired"),
        pytest.param(
            claim(completed(10**6), ttl_seconds_after_completed=-1),
            0,
            claiming.Wait(None),
            id="kept for ever",
        ),
    ],
)
def test_the_next_step_of_a_claim(given: SandboxClaim, got: int, expected: claiming.Step) -> None:
    assert claiming.plan(given, having(ready=got), target_exists=True, now=NOW) == expected


IN_PLACE = InplaceUpdate(image="other")
LATER = NOW + timedelta(seconds=20)
FAILING = SandboxClaimStatus(
    claim_start_time=NOW, failures=2, backoff_until=NOW + timedelta(seconds=4)
)
TRYING = structs.replace(FAILING, backoff_until=NOW)
OVER = SandboxClaimStatus(claim_start_time=NOW - timedelta(seconds=60))


@pytest.mark.parametrize(
    ("given", "has", "expected"),
    [
        pytest.param(
            claim(replicas=3),
            having(coming=3),
            claiming.AwaitSandboxes(LATER),
            id="what is on its way is waited for",
        ),
        pytest.param(
            claim(replicas=5), having(ready=1, coming=2), claiming.AcquireMore(2), id="and counts"
        ),
        pytest.param(
            claim(replicas=3, claim_timeout_seconds=10),
            having(coming=3),
            claiming.AwaitSandboxes(NOW + timedelta(seconds=10)),
            id="but no longer than the claim has time",
        ),
        pytest.param(
            claim(replicas=3),
            having(coming=1, unsized=2),
            claiming.Resize(boxes(2, "unsized")),
            id="what runs is given its size",
        ),
        pytest.param(
            claim(),
            having(ready=2, coming=2, unsized=1, lost=1),
            claiming.AbandonSandboxes(boxes(1, "lost")),
            id="what failed is given up first",
        ),
        pytest.param(
            claim(FAILING),
            having(),
            claiming.AwaitSandboxes(NOW + timedelta(seconds=4)),
            id="after failures it pauses",
        ),
        pytest.param(claim(TRYING), having(), claiming.AcquireMore(1), id="and tries one"),
        pytest.param(
            claim(TRYING),
            having(coming=1),
            claiming.AwaitSandboxes(LATER),
            id="and no more meanwhile",
        ),
        pytest.param(
            claim(OVER),
            having(ready=3, coming=1, unsized=1),
            claiming.AbandonSandboxes(boxes(1, "unsized") + boxes(1, "coming"), is_failure=False),
            id="its time is up: what is not ready goes",
        ),
        pytest.param(
            claim(OVER),
            having(ready=3),
            claiming.FinishClaim("TimeoutReached", "3 of 10 claimed in time", timed_out=True),
            id="and what is ready stays",
        ),
        pytest.param(
            claim(replicas=2),
            having(ready=2, coming=1),
            claiming.AbandonSandboxes(boxes(1, "coming"), is_failure=False),
            id="one too many goes",
        ),
    ],
)
def test_a_claim_is_complete_when_its_sandboxes_are_ready(
    given: SandboxClaim, has: ClaimedSandboxes, expected: claiming.Step
) -> None:
    assert claiming.plan(given, has, target_exists=True, now=NOW) == expected


def test_an_unsatisfiable_claim_fails_once_nothing_is_in_flight() -> None:
    def step(has: ClaimedSandboxes) -> claiming.Step:
        return claiming.plan(
            claim(inplace_update=IN_PLACE), has, target_exists=True, refusal="no", now=NOW
        )

    assert step(having()) == claiming.FinishClaim("InplaceUpdateRefused", "no")
    assert step(having(coming=5)) == claiming.AwaitSandboxes(LATER)


@pytest.mark.parametrize(
    ("failures", "seconds"), [(1, 2), (2, 4), (3, 8), (4, 16), (5, 16), (10**9, 16)]
)
def test_backoff_after_failures_grows_to_a_limit(failures: int, seconds: int) -> None:
    assert claiming.pause_after(failures) == timedelta(seconds=seconds)


def test_a_claim_on_a_missing_template_ends_at_once() -> None:
    step = claiming.plan(claim(), having(), target_exists=False, now=NOW)
    assert isinstance(step, claiming.FinishClaim)
    assert step.reason == "TemplateNotFound"


def sandbox(phase: Phase, strategy: PauseStrategy | None = None) -> Sandbox:
    status = SandboxStatus(phase=phase, pause_strategy=strategy)
    return Sandbox(metadata=ObjectMeta(name="s", namespace="default", uid="u"), status=status)


def checkpoint(
    status: CheckpointStatus | None = None, *, age: timedelta = timedelta(), **spec: Any
) -> Checkpoint:
    return Checkpoint(
        metadata=structs.replace(
            META, finalizers=(FINALIZER_CHECKPOINT,), creation_timestamp=NOW - age
        ),
        spec=CheckpointSpec(sandbox_name="s", **spec),
        status=status or CheckpointStatus(),
    )


FILES = (Content.FILESYSTEM,)
DONE = CheckpointStatus(phase=CheckpointPhase.SUCCEEDED, completion_time=NOW)


@pytest.mark.parametrize(
    ("given", "source", "expected"),
    [
        pytest.param(
            checkpoint(), sandbox(Phase.RUNNING), storing.TakeSnapshot(), id="running: stored"
        ),
        pytest.param(
            checkpoint(),
            sandbox(Phase.PAUSED, PauseStrategy.FREEZE),
            storing.TakeSnapshot(),
            id="paused: stored",
        ),
        pytest.param(
            checkpoint(persistent_contents=FILES),
            sandbox(Phase.PAUSED, PauseStrategy.STOP),
            storing.TakeSnapshot(),
            id="stopped: its files are",
        ),
        pytest.param(
            checkpoint(),
            sandbox(Phase.PAUSED, PauseStrategy.STOP),
            storing.Fail(
                "sandbox 's' was stopped and has no memory; remove memory from persistentContents"
            ),
            id="stopped: its memory is not",
        ),
        pytest.param(checkpoint(), sandbox(Phase.PENDING), storing.Wait(None), id="waits for it"),
        pytest.param(
            checkpoint(),
            None,
            storing.Wait(NOW + storing.WAIT_FOR_SANDBOX),
            id="waits for one that is yet to be applied",
        ),
        pytest.param(
            checkpoint(age=storing.WAIT_FOR_SANDBOX),
            None,
            storing.Fail("sandbox 's' was not found within 60 seconds"),
            id="but not for ever",
        ),
        pytest.param(
            checkpoint(sandbox_uid="meant"),
            None,
            storing.Fail("sandbox 's' was not found"),
            id="the one that was meant is gone",
        ),
        pytest.param(
            checkpoint(sandbox_uid="other"),
            sandbox(Phase.RUNNING),
            storing.Fail("sandbox 's' has another uid than spec.sandboxUid: it was recreated"),
            id="a namesake",
        ),
        pytest.param(
            checkpoint(),
            sandbox(Phase.FAILED),
            storing.Fail("sandbox 's' is Failed; it must be running or paused"),
            id="dead",
        ),
        pytest.param(checkpoint(DONE), None, storing.Wait(None), id="outlives its sandbox"),
        pytest.param(
            checkpoint(DONE, ttl_seconds_after_finished=60),
            None,
            storing.Wait(NOW + timedelta(seconds=60)),
            id="until its time is up",
        ),
        pytest.param(
            checkpoint(DONE, ttl_seconds_after_finished=0), None, storing.Expire(), id="then goes"
        ),
    ],
)
def test_the_next_step_of_a_checkpoint(
    given: Checkpoint, source: Sandbox | None, expected: storing.Step
) -> None:
    assert storing.plan(given, source, now=NOW) == expected


def test_a_checkpoint_gets_its_finalizer_first_and_deletes_its_data_last() -> None:
    bare = structs.replace(checkpoint(), metadata=META)
    assert storing.plan(bare, sandbox(Phase.RUNNING), now=NOW) == storing.AddFinalizer()
    going = structs.replace(checkpoint(DONE).metadata, deletion_timestamp=NOW)
    assert storing.plan(structs.replace(checkpoint(DONE), metadata=going), None, now=NOW) == (
        storing.DeleteData()
    )
