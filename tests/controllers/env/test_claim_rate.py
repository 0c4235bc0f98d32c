"""Claims counted per pool, and when a changed rate is worth a write."""

from datetime import UTC, datetime, timedelta

import pytest
from msgspec import structs

from paddock.controllers.env.claim_rate import ClaimRate, is_worth_writing
from paddock.resources.kinds.pool import AutoscalingState, SandboxPool, SandboxPoolSpec
from paddock.resources.kinds.sandbox import LABEL_POOL, ClaimIdentity, Sandbox, SandboxSpec
from paddock.resources.meta import Key, ObjectMeta, owner_reference

NOW = datetime(2030, 1, 1, tzinfo=UTC)
POOL = SandboxPool(
    metadata=ObjectMeta(name="p", namespace="default", uid="pool"), spec=SandboxPoolSpec()
)
EMPTY = AutoscalingState()


def sandbox(lock: str = "", *, at: datetime = NOW, pooled: bool = True) -> Sandbox:
    return Sandbox(
        metadata=ObjectMeta(
            name="s",
            namespace="default",
            labels={LABEL_POOL: "p"} if pooled else {},
            owner_references=(owner_reference(POOL),) if pooled else (),
        ),
        spec=SandboxSpec(
            claim=ClaimIdentity(sandbox_id="s", owner="t", lock=lock, claim_time=at)
            if lock
            else None
        ),
    )


def measured(*events: tuple[Sandbox | None, Sandbox | None]) -> AutoscalingState:
    rate = ClaimRate()
    for old, new in events:
        rate.observe(old, new)
    return rate.update(Key("default", "p"), EMPTY, NOW, window_seconds=10.0)


@pytest.mark.parametrize(
    ("events", "rate", "last"),
    [
        pytest.param([], 0.0, None, id="nothing"),
        pytest.param([(sandbox(), sandbox("a"))], 0.1, NOW, id="one claim"),
        pytest.param(
            [(sandbox(), sandbox("a")), (sandbox("a"), sandbox("b"))], 0.2, NOW, id="two claims"
        ),
        pytest.param([(sandbox("a"), sandbox("a"))], 0.0, None, id="the same claim"),
        pytest.param([(None, sandbox("a"))], 0.0, NOW, id="claimed before this process"),
        pytest.param([(sandbox("a"), None)], 0.0, None, id="deleted"),
        pytest.param(
            [(sandbox(pooled=False), sandbox("a", pooled=False))], 0.0, None, id="no pool"
        ),
    ],
)
def test_claims_are_counted_once(
    events: list[tuple[Sandbox | None, Sandbox | None]], rate: float, last: datetime | None
) -> None:
    state = measured(*events)
    assert state.claim_rate == pytest.approx(rate)
    assert state.last_claim_time == last


def test_a_count_is_used_once_and_a_forgotten_pool_has_none() -> None:
    rate, pool = ClaimRate(), Key("default", "p")
    rate.observe(sandbox(), sandbox("a"))
    first = rate.update(pool, EMPTY, NOW, window_seconds=10.0)
    again = rate.update(pool, first, NOW, window_seconds=10.0)
    assert again.claim_rate == pytest.approx(first.claim_rate)
    rate.observe(sandbox(), sandbox("b"))
    rate.forget(pool)
    assert rate.update(pool, EMPTY, NOW, window_seconds=10.0).claim_rate == 0.0


STATE = AutoscalingState(claim_rate=1.0)


@pytest.mark.parametrize(
    ("old", "new", "is_worth"),
    [
        (None, STATE, True),
        (STATE, STATE, False),
        (STATE, structs.replace(STATE, claim_rate=1.1), False),
        (STATE, structs.replace(STATE, claim_rate=1.3), True),
        (STATE, structs.replace(STATE, claim_rate=0.0), True),
        (STATE, structs.replace(STATE, last_claim_time=NOW), False),
        (STATE, structs.replace(STATE, message="grows"), True),
        (STATE, structs.replace(STATE, saturated_until=NOW + timedelta(1)), True),
    ],
)
def test_only_real_changes_are_written(
    old: AutoscalingState | None, new: AutoscalingState, is_worth: bool
) -> None:
    assert is_worth_writing(old, new) is is_worth
