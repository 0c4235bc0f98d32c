"""The sandboxes granted to each batch: examples. Invariants are in `test_allocation_properties`."""

from datetime import UTC, datetime, timedelta

import pytest

from paddock.controllers.batch.allocation.plan import (
    AGEING_SECONDS,
    BatchDemand,
    PoolStock,
    in_order,
    plan,
)
from paddock.kit.errors import NotFoundError
from paddock.resources.meta import Key

NOW = datetime(2030, 1, 1, tzinfo=UTC)


def demand(
    name: str, missing: int, *, tenant: str = "t", age: float = 0.0, at_once: int = 0,
    held: int = 0, priority: int = 0,
) -> BatchDemand:  # fmt: skip
    return BatchDemand(
        key=Key("n", name), tenant=tenant, since=NOW - timedelta(seconds=age), missing=missing,
        held=held, priority=priority, at_once=at_once,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("algorithm", "waiting", "ready", "grants"),
    [
        pytest.param("packed", [demand("a", 3, age=2), demand("b", 3)], 4, {"a": 3, "b": 1}),
        pytest.param("spread", [demand("a", 3, age=2), demand("b", 3)], 4, {"a": 2, "b": 2}),
        pytest.param("spread", [demand("a", 1, age=2), demand("b", 3)], 4, {"a": 1, "b": 3}),
        pytest.param("packed", [demand("a", 0)], 4, {}, id="nothing missing"),
        pytest.param(
            "packed", [demand("a", 5, at_once=5, age=2), demand("b", 1)], 4, {},
            id="what is not enough for the first is kept for it",
        ),
        pytest.param(
            "spread", [demand("a", 5, at_once=4, age=2), demand("b", 1)], 5, {"a": 4, "b": 1},
        ),
        pytest.param(
            "packed", [demand("a", 1), demand("b", 1, priority=1)], 1, {"b": 1}, id="priority"
        ),
        pytest.param(
            "packed",
            [demand("a", 1, age=3 * AGEING_SECONDS), demand("b", 1, priority=2)],
            1,
            {"a": 1},
            id="waiting counts as priority",
        ),
    ],
)  # fmt: skip
def test_sandboxes_are_granted_in_order_and_within_the_stock(
    algorithm: str, waiting: list[BatchDemand], ready: int, grants: dict[str, int]
) -> None:
    decision = plan(tuple(waiting), PoolStock(ready=ready), algorithm=algorithm, now=NOW)
    assert {key.name: count for key, count in decision.grants.items()} == grants
    assert decision.unmet == sum(item.missing for item in waiting) - sum(grants.values())


def test_with_equal_priority_the_tenant_that_holds_least_is_first() -> None:
    waiting = (demand("a", 2, tenant="rich", age=9), demand("b", 2, tenant="poor"))
    ordered = in_order(waiting, {"rich": 5}, now=NOW)
    assert [item.key.name for item in ordered] == ["b", "a"]


@pytest.mark.parametrize(
    ("ceiling", "limit", "is_unsatisfiable"),
    [(4, None, True), (4, 5, False), (5, None, False), (6, 2, False)],
)
def test_a_batch_that_no_pool_size_can_serve_is_reported(
    ceiling: int, limit: int | None, is_unsatisfiable: bool
) -> None:
    stock = PoolStock(ready=0, ceiling=ceiling, limit=limit)
    decision = plan((demand("a", 4, at_once=4, held=1),), stock, algorithm="packed", now=NOW)
    assert bool(decision.unsatisfiable) is is_unsatisfiable
    assert decision.unmet == (0 if is_unsatisfiable else 4)


def test_never_more_than_pool_max_is_allocated() -> None:
    assert PoolStock(ready=9, allocated=3, ceiling=5).grantable == 2
    assert PoolStock(ready=9, allocated=6, ceiling=5).grantable == 0


def test_an_unknown_algorithm_names_the_known_ones() -> None:
    with pytest.raises(NotFoundError) as caught:
        plan((), PoolStock(ready=0), algorithm="nope", now=NOW)
    assert "packed, spread" in (caught.value.hint or "")
