"""The progress of a claimed sandbox, derived from the sandbox alone."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from msgspec import structs

from paddock.controllers.claim.progress import ClaimedState, claimed_state, group_by_state, why_lost
from paddock.resources.kinds.claim import SandboxClaim, SandboxClaimSpec
from paddock.resources.kinds.sandbox import (
    CONDITION_READY,
    LABEL_GIVEN_UP,
    ClaimIdentity,
    Phase,
    Sandbox,
    SandboxSpec,
    SandboxStatus,
)
from paddock.resources.kinds.template import Resources, SandboxTemplateSpec
from paddock.resources.meta import Condition, ConditionStatus, ObjectMeta

NOW = datetime(2030, 1, 1, tzinfo=UTC)
LATE = NOW + timedelta(seconds=30)
CLAIM = SandboxClaim(
    metadata=ObjectMeta(name="c", namespace="default", uid="claim-1"),
    spec=SandboxClaimSpec(template_name="base", wait_ready_timeout_seconds=30),
)
IDENTITY = ClaimIdentity(
    sandbox_id="s", owner="default", lock="l", claim_time=NOW, claim_uid="claim-1"
)
READY = Condition(type=CONDITION_READY, status=ConditionStatus.TRUE, reason="Running")
SMALL, BIG = Resources(cpu="500m"), Resources(cpu="1")


def box(spec: dict[str, Any] | None = None, **status: Any) -> Sandbox:
    return Sandbox(
        metadata=ObjectMeta(name="s", namespace="default"),
        spec=SandboxSpec(**{"template": SandboxTemplateSpec(), "claim": IDENTITY, **(spec or {})}),
        status=SandboxStatus(**status),
    )


def running(spec: dict[str, Any] | None = None, **status: Any) -> Sandbox:
    given = {"phase": Phase.RUNNING, "incarnation": 1, "conditions": (READY,), "image": "base"}
    return box(spec, **{**given, "resources": BIG, **status})


def with_meta(sandbox: Sandbox, **changes: Any) -> Sandbox:
    return structs.replace(sandbox, metadata=structs.replace(sandbox.metadata, **changes))


@pytest.mark.parametrize(
    ("sandbox", "now", "expected"),
    [
        pytest.param(running(), NOW, ClaimedState.READY, id="from stock as it is"),
        pytest.param(running(), LATE, ClaimedState.READY, id="for good"),
        pytest.param(
            running(phase=Phase.FAILED), NOW, ClaimedState.READY, id="whatever becomes of it later"
        ),
        pytest.param(
            running({"paused": True}), NOW, ClaimedState.READY, id="also when it is paused"
        ),
        pytest.param(
            with_meta(running(), deletion_timestamp=NOW), NOW, ClaimedState.READY, id="or killed"
        ),
        pytest.param(box(), NOW, ClaimedState.COMING, id="being made"),
        pytest.param(box(), LATE, ClaimedState.LOST, id="being made for too long"),
        pytest.param(box(phase=Phase.FAILED), NOW, ClaimedState.LOST, id="could not be made"),
        pytest.param(
            with_meta(box(), deletion_timestamp=NOW), NOW, ClaimedState.LEFT, id="killed before"
        ),
        pytest.param(running({"image": "x"}), NOW, ClaimedState.COMING, id="is to have its image"),
        pytest.param(
            running({"image": "x"}, phase=Phase.FAILED), NOW, ClaimedState.LOST, id="cannot have it"
        ),
        pytest.param(
            running({"image": "x"}, image="x"), NOW, ClaimedState.READY, id="has its image"
        ),
        pytest.param(
            running({"resources": SMALL}), NOW, ClaimedState.UNSIZED, id="is to have its size"
        ),
        pytest.param(
            running({"resources": SMALL}), LATE, ClaimedState.LOST, id="is to have it for too long"
        ),
        pytest.param(
            running({"resources": SMALL, "image": "x"}), NOW, ClaimedState.COMING, id="image first"
        ),
        pytest.param(
            running({"resources": SMALL}, resources=SMALL),
            NOW,
            ClaimedState.READY,
            id="has its size",
        ),
        pytest.param(
            with_meta(box(phase=Phase.FAILED), labels={LABEL_GIVEN_UP: "true"}),
            NOW,
            ClaimedState.LEFT,
            id="given up and kept",
        ),
        pytest.param(running({"claim": None}), NOW, ClaimedState.LEFT, id="its pool's again"),
        pytest.param(
            running({"claim": structs.replace(IDENTITY, claim_uid="claim-0")}),
            NOW,
            ClaimedState.LEFT,
            id="of an earlier claim of that name",
        ),
    ],
)
def test_the_progress_of_a_sandbox(sandbox: Sandbox, now: datetime, expected: ClaimedState) -> None:
    assert claimed_state(CLAIM, sandbox, now=now) is expected


def test_sandboxes_of_a_claim_are_grouped_and_the_first_deadline_is_returned() -> None:
    older = structs.replace(IDENTITY, claim_time=NOW - timedelta(seconds=10))
    boxes = [box(), box({"claim": older}), running(), running({"resources": SMALL})]
    found = group_by_state(CLAIM, boxes, now=NOW)
    assert [len(part) for part in (found.ready, found.unsized, found.coming)] == [1, 1, 2]
    assert len(found.pending) == 3
    assert found.until == NOW + timedelta(seconds=20)
    assert group_by_state(CLAIM, [running()], now=NOW).until is None


@pytest.mark.parametrize(
    ("sandbox", "words"),
    [
        pytest.param(box(phase=Phase.FAILED, message="no such image"), "no such image", id="said"),
        pytest.param(box(), "its phase is Pending", id="slow"),
        pytest.param(running({"image": "x"}), "image x is being started", id="image"),
        pytest.param(running({"resources": SMALL}), "not been resized", id="size"),
    ],
)
def test_the_reason_for_a_failed_sandbox_is_reported(sandbox: Sandbox, words: str) -> None:
    assert words in why_lost(sandbox, now=LATE)
