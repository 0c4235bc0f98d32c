"""A claim changes the spec and metadata of a sandbox in one step."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from paddock.resources.kinds.sandbox import (
    LABEL_BATCH,
    LABEL_CLAIM,
    LABEL_CLAIMED,
    LABEL_POOL,
    LABEL_SHARD,
    LABEL_TEAM,
    ClaimIdentity,
    IdlePause,
    Sandbox,
    SandboxSpec,
    WakeOnTraffic,
)
from paddock.resources.kinds.template import NetworkPolicy, PauseStrategy, Resources
from paddock.resources.meta import ObjectMeta, OwnerReference
from paddock.resources.transitions.claim import Terms, claimed, claimed_spec
from paddock.resources.transitions.pause_strategy import strategy_for

NOW = datetime(2030, 1, 1, tzinfo=UTC)
END = NOW + timedelta(seconds=60)
POOL = OwnerReference(api_version="v", kind="SandboxPool", name="p", uid="u", controller=True)


def terms(*, timeout: int | None = 60, auto_pause: bool = False, **more: Any) -> Terms:
    identity = ClaimIdentity(
        sandbox_id="i",
        owner="team",
        lock="l",
        claim_time=NOW,
        timeout_seconds=timeout,
        auto_pause=auto_pause,
    )
    return Terms(identity=identity, **more)


def pooled(**spec: Any) -> Sandbox:
    return Sandbox(
        metadata=ObjectMeta(
            name="box",
            namespace="default",
            labels={LABEL_POOL: "p", "color": "pool's"},
            annotations={"kept": "1", "color": "pool's"},
            owner_references=(POOL,),
        ),
        spec=SandboxSpec(**spec),
    )


@pytest.mark.parametrize(
    ("asked", "pause_time", "shutdown_time"),
    [
        pytest.param(terms(), None, END, id="killed at the timeout"),
        pytest.param(terms(auto_pause=True), END, None, id="paused at the timeout"),
        pytest.param(terms(timeout=None), None, None, id="without a timeout"),
        pytest.param(
            terms(auto_pause=True, shutdown_time=NOW), None, NOW, id="a fixed shutdown time wins"
        ),
    ],
)
def test_a_claim_sets_the_deadlines(
    asked: Terms, pause_time: datetime | None, shutdown_time: datetime | None
):
    before = SandboxSpec(pause_time=NOW, shutdown_time=NOW)
    spec = claimed_spec(before, asked, now=NOW)
    assert (spec.pause_time, spec.shutdown_time) == (pause_time, shutdown_time)


SMALL, LARGE = Resources(cpu="1"), Resources(cpu="2")


@pytest.mark.parametrize(
    ("field", "before", "asked", "after"),
    [
        ("paused", True, None, False),
        ("recycle", True, None, False),
        ("wake_on_traffic", WakeOnTraffic(enabled=True), None, None),
        ("idle_pause", IdlePause(after_seconds=60), None, None),
        ("network", NetworkPolicy(), None, NetworkPolicy()),
        ("network", None, NetworkPolicy(), NetworkPolicy()),
        ("resources", SMALL, None, SMALL),
        ("resources", SMALL, LARGE, LARGE),
        ("image", "a", None, "a"),
        ("image", "a", "b", "b"),
        ("pause_strategy", PauseStrategy.STOP, None, PauseStrategy.STOP),
        ("pause_strategy", PauseStrategy.STOP, PauseStrategy.FREEZE, PauseStrategy.FREEZE),
        ("paused_retention_seconds", 5, None, None),
        ("paused_retention_seconds", None, 7, 7),
    ],
)
def test_a_claim_applies_its_terms(field: str, before: Any, asked: Any, after: Any):
    wanted = terms(**({field: asked} if asked is not None else {}))
    spec = claimed_spec(SandboxSpec(**{field: before}), wanted, now=NOW)
    assert getattr(spec, field) == after
    assert spec.claim == wanted.identity


def test_a_claimed_sandbox_no_longer_belongs_to_its_pool():
    labels = {"color": "claim's", "mine": "1", LABEL_CLAIM: "c", LABEL_POOL: "other"}
    asked = terms(labels=labels, annotations={"color": "claim's"})
    found = claimed(pooled(), asked, now=NOW)
    assert found.metadata.owner_references == ()
    assert found.metadata.labels == {
        "color": "pool's",
        "mine": "1",
        LABEL_POOL: "p",
        LABEL_CLAIM: "c",
        LABEL_CLAIMED: "true",
        LABEL_TEAM: "team",
    }
    assert found.metadata.annotations == {"kept": "1", "color": "claim's"}
    assert found.metadata.name == "box"


def test_a_claim_of_a_controller_overwrites_its_labels():
    asked = terms(labels={LABEL_BATCH: "new", LABEL_SHARD: "1"})
    stale = claimed(pooled(), terms(labels={LABEL_BATCH: "old", LABEL_SHARD: "0"}), now=NOW)
    found = claimed(stale, asked, now=NOW).metadata.labels
    assert (found[LABEL_BATCH], found[LABEL_SHARD]) == ("new", "1")


@pytest.mark.parametrize(
    ("own", "memory", "expected"),
    [
        (None, True, None),
        (None, False, PauseStrategy.STOP),
        (PauseStrategy.FREEZE, True, PauseStrategy.FREEZE),
        (PauseStrategy.FREEZE, False, PauseStrategy.STOP),
        (PauseStrategy.HIBERNATE, True, PauseStrategy.HIBERNATE),
        (PauseStrategy.STOP, True, None),
        (PauseStrategy.STOP, False, PauseStrategy.STOP),
    ],
)
def test_a_pause_without_memory_applies_once(
    own: PauseStrategy | None, memory: bool, expected: PauseStrategy | None
):
    assert strategy_for(SandboxSpec(pause_strategy=own), memory=memory) is expected
