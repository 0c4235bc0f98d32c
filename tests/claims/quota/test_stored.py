"""Stored bytes: what counts for whom, and that reservations keep the sum within the quota."""

import random
from dataclasses import dataclass, field
from datetime import UTC, datetime

import pytest
from msgspec import structs

from paddock.claims.caller import Caller
from paddock.claims.quota.ledger import Dimension, Ledger, Quota, QuotaLimit, QuotaScope, footprint
from paddock.claims.quota.reservations import QuotaReservations
from paddock.claims.quota.stored import (
    TEMPORARY_SECONDS,
    StoredLedger,
    checkpoint_holding,
    sandbox_holding,
)
from paddock.kit.errors import QuotaExceededError
from paddock.resources.kinds.checkpoint import (
    Checkpoint,
    CheckpointPhase,
    CheckpointSpec,
    CheckpointStatus,
)
from paddock.resources.kinds.sandbox import (
    ClaimIdentity,
    Sandbox,
    SandboxSpec,
    SandboxStatus,
)
from paddock.resources.kinds.template import Resources
from paddock.resources.meta import ObjectMeta, with_meta

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass
class Quotas:
    """Quotas of stored bytes by holder."""

    limits: dict[str, int] = field(default_factory=dict)
    namespace: str = "system"

    def quota_of(self, holder: str) -> Quota | None:
        limit = self.limits.get(holder)
        return None if limit is None else stored(limit)

    def quotas(self, caller: Caller) -> tuple[tuple[str, Quota | None], ...]:
        return tuple((holder, self.quota_of(holder)) for holder in (f"team:{caller.team}",))


class Objects:
    """An informer as far as `watch` uses it."""

    def __init__(self) -> None:
        self.handler = lambda old, new: None

    def subscribe(self, handler) -> None:
        self.handler = handler


def stored(limit: int) -> Quota:
    return Quota((QuotaLimit(Dimension.STORED, QuotaScope.ALL, limit),))


def a_checkpoint(
    uid: str, size: int = 0, *, team: str = "t", base: str = "", shared: int = 0, **spec
) -> Checkpoint:
    return Checkpoint(
        metadata=ObjectMeta(name=uid, namespace="default", uid=uid),
        spec=CheckpointSpec(sandbox_name="s", owner=team, **spec),
        status=CheckpointStatus(
            phase=CheckpointPhase.SUCCEEDED if size else CheckpointPhase.PENDING,
            size_bytes=size,
            base_uid=base,
            shared_bytes=shared,
        ),
    )


def a_hibernated_sandbox(uid: str, size: int, team: str = "t") -> Sandbox:
    claim = ClaimIdentity(lock=uid, owner=team, key_id="k", sandbox_id=uid, claim_time=NOW)
    return Sandbox(
        metadata=ObjectMeta(name=uid, namespace="default", uid=uid),
        spec=SandboxSpec(claim=claim, paused=True),
        status=SandboxStatus(stored_bytes=size),
    )


def deleting(obj):
    return with_meta(obj, deletion_timestamp=NOW, finalizers=("held",))


class Books:
    """A ledger that watches both kinds."""

    def __init__(self, **limits: int) -> None:
        self.quotas = Quotas({f"team:{name}": limit for name, limit in limits.items()})
        self.ledger = StoredLedger(self.quotas)
        self._checkpoints, self._sandboxes = Objects(), Objects()
        self.ledger.watch(self._checkpoints, checkpoint_holding)  # type: ignore[arg-type]
        self.ledger.watch(self._sandboxes, sandbox_holding)  # type: ignore[arg-type]

    def see(self, old, new) -> None:
        source = self._checkpoints if isinstance(new or old, Checkpoint) else self._sandboxes
        source.handler(old, new)


def test_checkpoints_and_hibernated_memory_count_for_team_and_key_until_they_are_deleted():
    books = Books()
    one, box = a_checkpoint("one", 100, key_id="k"), a_hibernated_sandbox("box", 7)
    books.see(None, one)
    books.see(None, box)
    assert (books.ledger.used("team:t"), books.ledger.used("key:k")) == (107, 107)
    awake = structs.replace(box, status=SandboxStatus())
    books.see(box, awake)
    assert books.ledger.used("team:t") == 100
    books.see(awake, box)
    books.see(one, deleting(one))
    assert books.ledger.used("team:t") == 7
    books.see(deleting(one), None)
    books.see(box, deleting(box))
    assert (books.ledger.used("team:t"), books.ledger.used("key:k")) == (0, 0)


def test_unfinished_temporary_and_unclaimed_things_do_not_count():
    books = Books()
    books.see(None, a_checkpoint("pending"))
    books.see(None, a_checkpoint("fork", 10, ttl_seconds_after_finished=TEMPORARY_SECONDS))
    warm = a_hibernated_sandbox("warm", 10)
    books.see(None, structs.replace(warm, spec=SandboxSpec()))
    assert books.ledger.used("team:t") == 0
    books.see(None, a_checkpoint("long", 10, ttl_seconds_after_finished=TEMPORARY_SECONDS + 1))
    assert books.ledger.used("team:t") == 10


def test_a_checkpoint_without_an_owner_counts_for_its_namespace():
    books = Books()
    books.see(None, a_checkpoint("made-by-hand", 10, team=""))
    assert books.ledger.used("team:default") == 10


def test_a_reservation_is_replaced_by_what_was_stored():
    books = Books(t=100)
    key = ("Checkpoint", "one")
    books.ledger.reserve(key, ("team:t",), 60)
    with pytest.raises(QuotaExceededError, match=r"team t has 60 bytes of 100 bytes stored.bytes"):
        books.ledger.reserve(("Checkpoint", "two"), ("team:t",), 41)
    books.ledger.settle(key, 40)
    assert books.ledger.used("team:t") == 40
    before, after = a_checkpoint("one"), a_checkpoint("one", 40)
    books.see(None, before)
    assert books.ledger.used("team:t") == 40
    books.see(before, after)
    books.ledger.release(key)
    assert books.ledger.used("team:t") == 40
    books.ledger.reserve(("Checkpoint", "two"), ("team:t",), 60)


def test_work_that_turns_out_too_large_keeps_no_reservation():
    books = Books(t=100)
    books.see(None, a_checkpoint("there", 50))
    key = ("Checkpoint", "one")
    books.ledger.reserve(key, ("team:t",), 10)
    with pytest.raises(QuotaExceededError) as refused:
        books.ledger.settle(key, 51)
    assert "this needs 51 bytes" in refused.value.message
    assert refused.value.hint
    assert books.ledger.used("team:t") == 50


def test_files_that_checkpoints_share_count_once_also_after_their_base_is_deleted():
    books = Books()
    base = a_checkpoint("base", 100)
    one = a_checkpoint("one", 130, base="base", shared=100)
    two = a_checkpoint("two", 140, base="base", shared=100)
    books.see(None, one)
    assert books.ledger.used("team:t") == 130
    books.see(None, base)
    books.see(None, two)
    assert books.ledger.used("team:t") == 100 + 30 + 40
    books.see(base, deleting(base))
    assert books.ledger.used("team:t") == 100 + 30 + 40
    books.see(two, deleting(two))
    assert books.ledger.used("team:t") == 130
    books.see(one, deleting(one))
    assert books.ledger.used("team:t") == 0


def test_a_base_of_another_team_counts_for_that_team_alone():
    books = Books()
    books.see(None, a_checkpoint("base", 100, team="other"))
    books.see(None, a_checkpoint("one", 130, base="base", shared=100))
    books.see(None, a_checkpoint("two", 140, base="base", shared=100))
    assert books.ledger.used("team:t") == 100 + 30 + 40
    assert books.ledger.used("team:other") == 100


def test_the_real_size_is_settled_without_what_is_shared():
    books = Books(t=150)
    books.see(None, a_checkpoint("base", 100))
    key = ("Checkpoint", "one")
    books.ledger.reserve(key, ("team:t",), 10)
    with pytest.raises(QuotaExceededError):
        books.ledger.settle(key, 151, ("Checkpoint", "base"), 100)
    books.ledger.reserve(key, ("team:t",), 10)
    books.ledger.settle(key, 150, ("Checkpoint", "base"), 100)
    assert books.ledger.used("team:t") == 150
    books.see(None, a_checkpoint("one", 150, base="base", shared=100))
    books.ledger.release(key)
    assert books.ledger.used("team:t") == 150


@pytest.mark.parametrize("seed", range(10))
def test_the_usage_does_not_depend_on_the_order_of_events(seed: int):
    dice = random.Random(seed)
    items = [a_checkpoint("c0", 100)]
    for number in range(1, 30):
        base = dice.choice(items)
        shared = base.status.size_bytes
        team = dice.choice("tu")
        size = shared + dice.randrange(50)
        items.append(
            a_checkpoint(
                f"c{number}", size, team=team, base=base.metadata.uid, shared=shared, key_id="k"
            )
        )
    deleted = dice.sample(items, 10)
    left = [item for item in items if item not in deleted]
    one, other = Books(), Books()
    for item in dice.sample(items, len(items)):
        one.see(None, item)
    for item in deleted:
        one.see(item, deleting(item))
    for item in dice.sample(left, len(left)):
        other.see(None, item)
    for holder in ("team:t", "team:u", "key:k"):
        assert one.ledger.used(holder) == other.ledger.used(holder) > 0


def test_an_estimate_of_nothing_is_refused_by_a_full_quota():
    books = Books(t=10)
    books.see(None, a_checkpoint("there", 10))
    with pytest.raises(QuotaExceededError):
        books.ledger.reserve(("Checkpoint", "one"), ("team:t",), 0)


async def test_a_full_store_does_not_refuse_claims_and_resumes():
    quotas = Quotas({"team:t": 0})
    reservations = QuotaReservations(Ledger(), quotas)
    await reservations.reserve(Caller("t"), "lock", footprint(Resources()))


LIMITS = {"a": 1000, "b": 300}


class RandomWork:
    """Random starts, ends, failures, deletions, wrong estimates and restarts."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.books = Books(**LIMITS)
        self.existing: dict[str, Checkpoint] = {}
        self.at_work: dict[str, tuple[str, int]] = {}
        self.made = self.refused = 0

    def step(self) -> None:
        actions = (self.start, self.end, self.fail, self.cancel, self.delete, self.restart)
        action = self.dice.choices(actions, weights=(40, 25, 10, 5, 17, 3))[0]
        try:
            action()
        except QuotaExceededError:
            self.refused += 1

    def start(self) -> None:
        self.made += 1
        uid, team, estimate = f"c{self.made}", self.dice.choice("ab"), self.dice.randrange(200)
        self.books.ledger.reserve(("Checkpoint", uid), (f"team:{team}",), estimate)
        self.at_work[uid] = (team, estimate)
        self.books.see(None, a_checkpoint(uid, team=team))

    def pick(self, items) -> str | None:
        return self.dice.choice(list(items)) if items else None

    def end(self) -> None:
        if uid := self.pick(self.at_work):
            team, estimate = self.at_work.pop(uid)
            size = max(1, int(estimate * self.dice.choice((0.5, 1, 1, 3))))
            self.books.ledger.settle(("Checkpoint", uid), size)
            self.existing[uid] = a_checkpoint(uid, size, team=team)
            self.books.see(a_checkpoint(uid, team=team), self.existing[uid])
            self.books.ledger.release(("Checkpoint", uid))

    def fail(self) -> None:
        if uid := self.pick(self.at_work):
            self.books.ledger.release(("Checkpoint", uid))
            del self.at_work[uid]

    def cancel(self) -> None:
        """Delete an object while its state is being stored."""
        if uid := self.pick(self.at_work):
            before = a_checkpoint(uid, team=self.at_work.pop(uid)[0])
            self.books.see(before, deleting(before))

    def delete(self) -> None:
        if uid := self.pick(self.existing):
            gone = self.existing.pop(uid)
            self.books.see(gone, deleting(gone))
            self.books.see(deleting(gone), None)

    def restart(self) -> None:
        """Forget all but the store."""
        self.books = Books(**LIMITS)
        self.at_work.clear()
        for checkpoint in self.existing.values():
            self.books.see(None, checkpoint)


@pytest.mark.parametrize("seed", range(30))
def test_the_usage_is_the_sum_of_what_exists_and_never_above_the_quota(seed: int):
    work = RandomWork(seed)
    for _ in range(400):
        work.step()
        for name, limit in LIMITS.items():
            kept = sum(
                item.status.size_bytes for item in work.existing.values() if item.spec.owner == name
            )
            promised = sum(size for owner, size in work.at_work.values() if owner == name)
            assert work.books.ledger.used(f"team:{name}") == kept + promised <= limit
    assert work.refused
