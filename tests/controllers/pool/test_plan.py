"""How many sandboxes a pool creates or deletes."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddock.controllers.pool.plan import Counts, desired_total, int_or_percent, plan
from paddock.resources.kinds.pool import Capacity, SandboxPoolSpec, ScaleStrategy, UpdateStrategy

NOW = datetime(2030, 1, 1, tzinfo=UTC)


def banded(low: int, high: int, floor: int = 0, ceiling: int = 100) -> SandboxPoolSpec:
    capacity = Capacity(buffer_min=low, buffer_max=high, pool_min=floor, pool_max=ceiling)
    return SandboxPoolSpec(capacity=capacity)


@pytest.mark.parametrize(
    ("spec", "counts", "create", "delete"),
    [
        pytest.param(SandboxPoolSpec(replicas=5), Counts(), 5, 0, id="empty pool fills"),
        pytest.param(
            SandboxPoolSpec(replicas=5), Counts(creating_new=5), 0, 0, id="in the making counts"
        ),
        pytest.param(
            SandboxPoolSpec(replicas=5),
            Counts(available_new=4, allocated=1),
            1,
            0,
            id="a claimed one is replaced",
        ),
        pytest.param(
            SandboxPoolSpec(replicas=2), Counts(available_new=5), 0, 3, id="too many are let go"
        ),
        pytest.param(
            banded(2, 6), Counts(available_new=4), 0, 0, id="inside the band nothing happens"
        ),
        pytest.param(banded(2, 6), Counts(available_new=1), 1, 0, id="below: to the floor"),
        pytest.param(
            banded(2, 6), Counts(available_new=9), 0, 3, id="above the band: to its ceiling"
        ),
        pytest.param(
            banded(1, 2, floor=4), Counts(available_new=2), 2, 0, id="pool floor holds in all"
        ),
        pytest.param(
            banded(5, 5, ceiling=6),
            Counts(available_new=1, allocated=4),
            1,
            0,
            id="pool ceiling caps growth",
        ),
        pytest.param(
            banded(5, 5, ceiling=6),
            Counts(available_new=0, allocated=4, unusable=2),
            0,
            0,
            id="what is not deleted yet counts towards the ceiling",
        ),
        pytest.param(
            banded(1, 1, ceiling=50),
            Counts(available_new=1, supply=10),
            10,
            0,
            id="waiting batches are supplied",
        ),
        pytest.param(
            banded(1, 1, ceiling=3), Counts(allocated=5), 0, 0, id="allocated ones are never let go"
        ),
    ],
)
def test_a_pool_grows_and_shrinks_towards_its_band(
    spec: SandboxPoolSpec, counts: Counts, create: int, delete: int
) -> None:
    decision = plan(spec, counts, now=NOW)
    assert decision.create == create
    assert decision.delete_creating + decision.delete_available == delete
    assert not decision.delete_recycling


@pytest.mark.parametrize(
    ("spec", "counts", "create", "deleted"),
    [
        pytest.param(
            banded(1, 2, ceiling=2),
            Counts(available_new=1, recycling_new=1),
            *(0, (0, 0, 0)),
            id="the band has room for it",
        ),
        pytest.param(
            banded(1, 2, ceiling=2),
            Counts(recycling_new=2),
            *(0, (0, 0, 0)),
            id="all are being reset",
        ),
        pytest.param(
            banded(1, 2),
            Counts(available_new=2, recycling_new=1),
            *(0, (0, 1, 0)),
            id="the buffer is full",
        ),
        pytest.param(
            banded(2, 2),
            Counts(available_new=1, creating_new=1, recycling_new=1),
            *(0, (1, 0, 0)),
            id="one that is being created is given up first",
        ),
        pytest.param(
            banded(0, 2, ceiling=50),
            Counts(recycling_new=1, supply=5),
            *(4, (0, 0, 0)),
            id="it serves what waits",
        ),
    ],
)
def test_a_returned_sandbox_is_kept_while_the_band_has_room(
    spec: SandboxPoolSpec, counts: Counts, create: int, deleted: tuple[int, int, int]
) -> None:
    found = plan(spec, counts, now=NOW)
    assert found.create == create
    assert (found.delete_creating, found.delete_recycling, found.delete_available) == deleted


def test_a_fresh_pool_starts_slowly_and_doubles_with_success() -> None:
    spec = SandboxPoolSpec(replicas=1000)
    assert plan(spec, Counts(), now=NOW).create == 16
    assert plan(spec, Counts(available_new=16), now=NOW).create == 32
    assert plan(spec, Counts(available_new=100, creating_new=150), now=NOW).create == 50


def test_max_unavailable_limits_concurrent_creations() -> None:
    spec = SandboxPoolSpec(replicas=100, scale_strategy=ScaleStrategy(max_unavailable="5%"))
    assert plan(spec, Counts(available_new=50, creating_new=2), now=NOW).create == 3


def test_a_crash_looping_template_backs_off_and_retries_one_at_a_time() -> None:
    spec = SandboxPoolSpec(replicas=10)
    waiting = plan(spec, Counts(), failures=3, backoff_until=NOW + timedelta(seconds=4), now=NOW)
    assert (waiting.create, waiting.wait_seconds) == (0, 4)
    assert "3 failed starts" in waiting.reason
    assert plan(spec, Counts(), failures=3, backoff_until=NOW, now=NOW).create == 1


def test_a_rolling_update_replaces_idle_ones_within_its_budget() -> None:
    spec = SandboxPoolSpec(replicas=10, update_strategy=UpdateStrategy(max_unavailable="20%"))
    decision = plan(spec, Counts(available_old=8, creating_old=2), now=NOW)
    assert (decision.replace_creating, decision.replace_available) == (2, 2)
    busy = plan(spec, Counts(available_old=8, creating_new=2), now=NOW)
    assert busy.replace_available == 0


def test_a_paused_pool_does_nothing() -> None:
    decision = plan(SandboxPoolSpec(replicas=10, paused=True), Counts(), now=NOW)
    assert decision.create == 0


def test_percentages_are_rounded_up() -> None:
    assert int_or_percent("20%", 4, default=0) == 1
    assert int_or_percent(3, 4, default=0) == 3
    assert int_or_percent(None, 4, default=7) == 7


counts = st.builds(
    Counts,
    creating_new=st.integers(0, 50),
    creating_old=st.integers(0, 50),
    recycling_new=st.integers(0, 50),
    recycling_old=st.integers(0, 50),
    available_new=st.integers(0, 50),
    available_old=st.integers(0, 50),
    unusable=st.integers(0, 50),
    allocated=st.integers(0, 50),
    supply=st.integers(0, 50),
)
bands = st.tuples(*[st.integers(0, 60)] * 4).map(
    lambda four: banded(min(four[:2]), max(four[:2]), min(four[2:]), max(*four[2:], max(four[:2])))
)


@given(bands, counts)
def test_for_any_counts_the_maximum_holds_and_only_idle_sandboxes_are_deleted(
    spec: SandboxPoolSpec, now: Counts
) -> None:
    decision = plan(spec, now, now=NOW)
    assert spec.capacity is not None
    present = now.creating + now.recycling + now.available + now.allocated
    if decision.create:
        assert present + now.unusable + decision.create <= spec.capacity.pool_max
    assert decision.delete_creating <= now.creating
    assert decision.delete_recycling <= now.recycling
    assert decision.delete_available <= now.available
    deleted = decision.delete_creating + decision.delete_recycling + decision.delete_available
    assert not (decision.create and deleted)
    assert decision.desired >= now.allocated
    assert desired_total(spec, now) == decision.desired


@pytest.mark.parametrize(
    ("counts", "seconds", "create", "defers"),
    [
        pytest.param(Counts(available_new=6, allocated=4), 0.0, 0, True, id="enough, just claimed"),
        pytest.param(Counts(available_new=6, allocated=4), 2.0, 4, False, id="enough, a lull"),
        pytest.param(Counts(available_new=2, allocated=8), 0.0, 1, False, id="few: one at a time"),
        pytest.param(
            Counts(available_new=2, creating_new=1, allocated=7),
            *(0.0, 0, False),
            id="one is in the making",
        ),
        pytest.param(Counts(allocated=10), 0.0, 10, False, id="an empty one hurries"),
        pytest.param(
            Counts(available_old=6, allocated=4),
            0.0,
            4,
            False,
            id="what is outdated does not count",
        ),
        pytest.param(
            Counts(available_new=6, allocated=4, supply=2),
            *(0.0, 6, False),
            id="somebody waits for it",
        ),
    ],
)
def test_a_pool_with_stock_refills_when_claims_pause(
    counts: Counts, seconds: float, create: int, defers: bool
):
    spec = SandboxPoolSpec(replicas=10)

    decision = plan(spec, counts, since_claim_seconds=seconds, now=NOW)

    assert decision.create == create
    assert (decision.wait_seconds is not None) == (create < 4)
    assert decision.defers == defers
