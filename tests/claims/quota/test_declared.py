"""Pools and batches of API keys hold quota before their sandboxes exist, and each sandbox once."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from paddock.claims.caller import Caller
from paddock.claims.quota.declared import Declared, DeclaredQuota, most_unclaimed
from paddock.claims.quota.ledger import (
    Dimension,
    Footprint,
    Ledger,
    Quota,
    QuotaLimit,
    QuotaScope,
    holders,
)
from paddock.kit.clock import system
from paddock.kit.errors import ConflictError, QuotaExceededError
from paddock.resources.kinds.batch import BatchSandbox, BatchSandboxSpec
from paddock.resources.kinds.pool import Capacity, SandboxPool, SandboxPoolSpec
from paddock.resources.kinds.sandbox import ClaimIdentity, Sandbox, SandboxSpec
from paddock.resources.kinds.template import Resources, SandboxTemplateSpec
from paddock.resources.meta import ANNOTATION_KEY, ObjectMeta, with_meta

LIMIT = 10
QUOTA = Quota((QuotaLimit(Dimension.COUNT, QuotaScope.ALL, LIMIT),))


class Quotas:
    """The same quota for every team; none for keys."""

    namespace = "paddock-system"

    def quotas(self, caller: Caller) -> tuple[tuple[str, Quota | None], ...]:
        return tuple((one, self.quota_of(one)) for one in holders(caller.team, caller.key_id))

    def quota_of(self, holder: str) -> Quota | None:
        return QUOTA if holder.startswith("team:") else None


def meta(name: str, **fields: Any) -> ObjectMeta:
    return ObjectMeta(namespace="red", name=name, annotations={ANNOTATION_KEY: "k"}, **fields)


def pool(count: int, name: str = "p") -> SandboxPool:
    spec = SandboxPoolSpec(template=SandboxTemplateSpec(), replicas=count)
    return SandboxPool(metadata=meta(name), spec=spec)


def batch(count: int) -> BatchSandbox:
    spec = BatchSandboxSpec(template=SandboxTemplateSpec(), replicas=count)
    return BatchSandbox(metadata=meta("b", uid="u-1"), spec=spec)


def shard(number: int) -> Sandbox:
    claim = ClaimIdentity(
        sandbox_id=f"s{number}", owner="red", lock=f"u-1-{number}-s{number}",
        claim_time=system().now(),
    )  # fmt: skip
    return Sandbox(metadata=ObjectMeta(namespace="red", name=f"b-{number}"),
                   spec=SandboxSpec(template=SandboxTemplateSpec(), claim=claim))  # fmt: skip


def used(ledger: Ledger) -> int:
    return ledger.used("team:red", Dimension.COUNT, QuotaScope.ALL)


def write(quota: DeclaredQuota, obj: Declared, *, dry_run: bool = False) -> None:
    with quota.reserving(obj, dry_run=dry_run):
        pass


def fail(quota: DeclaredQuota, obj: Declared, ledger: Ledger) -> int:
    """Reserve for a write that is a conflict; return what counted meanwhile."""
    counted = 0
    with contextlib.suppress(ConflictError), quota.reserving(obj):
        counted = used(ledger)
        raise ConflictError("another write was faster")
    return counted


@pytest.mark.parametrize(
    ("spec", "count"),
    [
        (SandboxPoolSpec(replicas=3), 3),
        (SandboxPoolSpec(capacity=Capacity(buffer_min=1, buffer_max=4, pool_max=9)), 4),
        (SandboxPoolSpec(capacity=Capacity(buffer_min=1, buffer_max=4, pool_min=6, pool_max=9)), 6),
        (SandboxPoolSpec(capacity=Capacity(buffer_min=0, buffer_max=0, pool_max=9)), 0),
    ],
)
def test_a_pool_counts_for_the_most_unclaimed_sandboxes_that_it_can_have(
    spec: SandboxPoolSpec, count: int
) -> None:
    assert most_unclaimed(spec) == count


def test_a_write_that_fails_or_is_only_tried_holds_nothing_more() -> None:
    ledger = Ledger()
    quota = DeclaredQuota(ledger, Quotas())
    write(quota, pool(4))
    for change in (9, 2):
        write(quota, pool(change), dry_run=True)
        assert used(ledger) == 4
        # A smaller amount counts only once it is written.
        assert fail(quota, pool(change), ledger) == max(change, 4)
        assert used(ledger) == 4
    with pytest.raises(QuotaExceededError):
        write(quota, pool(LIMIT + 1))
    assert used(ledger) == 4


@pytest.mark.parametrize("loser", [1, 2, LIMIT - 1])
def test_a_write_that_loses_against_another_leaves_what_that_one_wrote(loser: int) -> None:
    ledger = Ledger()
    quota = DeclaredQuota(ledger, Quotas())
    write(quota, pool(1))
    quota.observe(None, pool(1))
    with contextlib.suppress(ConflictError), quota.reserving(pool(loser)):
        write(quota, pool(4))
        quota.observe(pool(1), pool(4))
        assert used(ledger) == max(loser, 4)
        raise ConflictError("another write was faster")
    assert used(ledger) == 4


@pytest.mark.parametrize("later", [2, 6])
def test_a_write_that_ends_after_a_later_one_does_not_replace_its_size(later: int) -> None:
    ledger = Ledger()
    quota = DeclaredQuota(ledger, Quotas())
    with quota.reserving(pool(4)):
        quota.observe(None, pool(4))
        write(quota, pool(later))
        quota.observe(pool(4), pool(later))
    assert used(ledger) == later


def test_a_pool_above_a_lowered_quota_may_shrink() -> None:
    ledger = Ledger()
    quota = DeclaredQuota(ledger, Quotas())
    quota.observe(None, pool(LIMIT + 5))
    write(quota, pool(LIMIT + 1))
    assert used(ledger) == LIMIT + 1


class KeyQuotas(Quotas):
    """A quota of one key, `limited`."""

    def quota_of(self, holder: str) -> Quota | None:
        return QUOTA if holder == "key:limited" else None


@pytest.mark.parametrize("make", [pool, batch])
def test_a_key_with_a_quota_grows_nothing_that_another_key_created(
    make: Callable[[int], Declared],
) -> None:
    quota = DeclaredQuota(Ledger(), KeyQuotas())
    limited, creator, other = (Caller("red", name) for name in ("limited", "k", "other"))
    with pytest.raises(QuotaExceededError, match="has a quota of its own"):
        quota.check_growth(limited, make(2), make(3))
    quota.check_growth(limited, make(3), make(2))
    quota.check_growth(limited, make(3), make(3))
    for caller in (creator, other):
        quota.check_growth(caller, make(2), make(3))
    own = with_meta(make(2), annotations={ANNOTATION_KEY: "limited"})
    quota.check_growth(limited, own, make(3))


def test_larger_sandboxes_of_a_pool_are_growth_too() -> None:
    quota = DeclaredQuota(Ledger(), KeyQuotas())
    large = SandboxTemplateSpec(resources=Resources(memory="64Gi"))
    grown = structs.replace(pool(2), spec=structs.replace(pool(2).spec, template=large))
    with pytest.raises(QuotaExceededError):
        quota.check_growth(Caller("red", "limited"), pool(2), grown)


def test_what_operators_create_does_not_count() -> None:
    ledger = Ledger()
    quota = DeclaredQuota(ledger, Quotas())
    for obj in (pool(5), batch(5)):
        quota.observe(None, with_meta(obj, annotations={}))
    assert used(ledger) == 0


@pytest.mark.parametrize("is_batch_first", [True, False])
def test_a_sandbox_of_a_batch_counts_once_in_any_order_of_events(is_batch_first: bool) -> None:
    ledger = Ledger()
    quota = DeclaredQuota(ledger, Quotas())
    events = [lambda: quota.observe(None, batch(3)), lambda: ledger.observe(None, shard(0))]
    for event in events if is_batch_first else reversed(events):
        event()
    assert used(ledger) == 3
    ledger.observe(shard(0), structs.replace(shard(0), status=shard(0).status))
    assert used(ledger) == 3
    quota.observe(batch(3), None)
    assert used(ledger) == 0


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("p", "q", "claim", "release")),
            st.integers(0, LIMIT + 2),
            st.booleans(),
        ),
        max_size=40,
    )
)
def test_no_order_of_writes_and_claims_exceeds_the_quota(
    steps: list[tuple[str, int, bool]],
) -> None:
    ledger = Ledger()
    quota = DeclaredQuota(ledger, Quotas())
    claims: list[str] = []
    for what, count, fails in steps:
        with contextlib.suppress(QuotaExceededError):
            if what == "claim":
                lock = f"lock-{len(claims)}-{count}"
                ledger.reserve(lock, Quotas().quotas(Caller("red")), Footprint(1, 1))
                claims.append(lock)
            elif what == "release":
                ledger.release(claims.pop() if claims else "none")
            elif fails:
                fail(quota, pool(count, what), ledger)
            else:
                write(quota, pool(count, what))
        assert used(ledger) <= LIMIT
