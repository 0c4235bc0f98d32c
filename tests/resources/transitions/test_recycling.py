"""Outcomes for sandboxes that are released to their pool."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from msgspec import structs

from paddock.resources.kinds.pool import (
    RecycleStrategy,
    RecycleType,
    SandboxPool,
    SandboxPoolSpec,
)
from paddock.resources.kinds.sandbox import (
    LABEL_CLAIMED,
    LABEL_EVICT,
    LABEL_POOL,
    LABEL_REVISION,
    LABEL_TEAM,
    LABEL_TEMPLATE,
    ClaimIdentity,
    Phase,
    Sandbox,
    SandboxSpec,
    SandboxStatus,
)
from paddock.resources.kinds.template import Resources, SandboxTemplateSpec, TemplateRef
from paddock.resources.meta import ObjectMeta, owner_reference, with_meta
from paddock.resources.transitions import recycling
from paddock.resources.transitions.recycling import ANNOTATION_RESET_BY, Delete, Return

NOW = datetime(2030, 1, 1, tzinfo=UTC)
OWN = {LABEL_POOL: "p", LABEL_TEMPLATE: "t", LABEL_REVISION: "r", "color": "x"}


def pool(kind: RecycleType, **strategy: Any) -> SandboxPool:
    return SandboxPool(
        metadata=ObjectMeta(name="p", namespace="default", uid="u"),
        spec=SandboxPoolSpec(
            labels={"color": "x"}, recycle_strategy=RecycleStrategy(type=kind, **strategy)
        ),
    )


def used(*, recycled: int = 0, phase: Phase = Phase.RUNNING, **spec: Any) -> Sandbox:
    claim = ClaimIdentity(sandbox_id="i", owner="team", lock="l", claim_time=NOW)
    return Sandbox(
        metadata=ObjectMeta(
            name="box",
            namespace="default",
            labels={**OWN, LABEL_CLAIMED: "true", LABEL_TEAM: "team", "theirs": "1"},
            annotations={"theirs": "1"},
        ),
        spec=SandboxSpec(
            template=SandboxTemplateSpec(image="a"),
            template_ref=TemplateRef(name="t"),
            restore_from="cp",
            claim=claim,
            shutdown_time=NOW,
            **spec,
        ),
        status=SandboxStatus(phase=phase, recycled_count=recycled),
    )


@pytest.mark.parametrize(
    ("sandbox", "home", "why"),
    [
        pytest.param(used(), None, "its pool was deleted", id="no pool"),
        pytest.param(
            used(),
            with_meta(pool(RecycleType.NOOP), deletion_timestamp=NOW),
            "its pool was deleted",
            id="pool is being deleted",
        ),
        pytest.param(used(phase=Phase.FAILED), pool(RecycleType.NOOP), "it is Failed", id="failed"),
        pytest.param(used(paused=True), pool(RecycleType.NOOP), "it is paused", id="paused"),
        pytest.param(
            with_meta(used(), labels={**OWN, LABEL_EVICT: ""}),
            pool(RecycleType.NOOP),
            "evict",
            id="evicted",
        ),
        pytest.param(used(), pool(RecycleType.DELETE), "is Delete", id="strategy Delete"),
        pytest.param(used(image="b"), pool(RecycleType.NOOP), "image", id="another image"),
        pytest.param(
            used(resources=Resources(cpu="1")), pool(RecycleType.NOOP), "size", id="another size"
        ),
        pytest.param(
            used(recycled=3), pool(RecycleType.RESTART, max_recycles=3), "3 times", id="too often"
        ),
    ],
)
def test_sandboxes_that_cannot_be_recycled_are_deleted(
    sandbox: Sandbox, home: SandboxPool | None, why: str
):
    found = recycling.outcome(sandbox, home, now=NOW)
    assert isinstance(found, Delete)
    assert why in found.why


def test_a_returned_sandbox_has_its_original_spec_and_labels():
    home = pool(RecycleType.NOOP)
    found = recycling.outcome(used(), home, now=NOW)
    assert isinstance(found, Return)
    assert found.sandbox.metadata.labels == {**OWN, LABEL_CLAIMED: "false"}
    assert found.sandbox.metadata.annotations == {}
    assert found.sandbox.metadata.owner_references == (owner_reference(home),)
    assert found.sandbox.spec == SandboxSpec(
        template=SandboxTemplateSpec(image="a"),
        template_ref=TemplateRef(name="t"),
        restore_from="cp",
    )
    again = recycling.outcome(found.sandbox, home, now=NOW)
    assert again == Return(found.sandbox), "the second time changes nothing"


def test_a_reset_is_overdue_after_its_timeout():
    home = pool(RecycleType.RESTART, max_recycles=3, timeout_seconds=40)
    found = recycling.outcome(used(recycled=2), home, now=NOW)
    assert isinstance(found, Return)
    assert found.sandbox.spec.recycle
    assert found.sandbox.spec.claim is None
    assert not recycling.is_overdue(found.sandbox, NOW + timedelta(seconds=39))
    assert recycling.is_overdue(found.sandbox, NOW + timedelta(seconds=40))


@pytest.mark.parametrize(
    ("recycle", "by", "expected"),
    [
        (True, NOW.isoformat(), True),
        (False, NOW.isoformat(), False),
        (True, None, False),
        (True, "garbled", True),
        (True, "2030-01-01T00:00:00", True),
    ],
)
def test_when_a_reset_is_overdue(recycle: bool, by: str | None, expected: bool):
    annotations = {} if by is None else {ANNOTATION_RESET_BY: by}
    sandbox = with_meta(used(), annotations=annotations)
    sandbox = structs.replace(sandbox, spec=structs.replace(sandbox.spec, recycle=recycle))
    assert recycling.is_overdue(sandbox, NOW) is expected
