"""The backoff of a template shard after failures."""

from datetime import UTC, datetime, timedelta

import pytest
from msgspec import structs

from paddock.controllers.batch.shard_backoff import RESET_AFTER, ShardBackoff
from paddock.resources.kinds.batch import BatchSandbox
from tests.controllers.batch.make import batch

NOW = datetime(2030, 1, 1, tzinfo=UTC)
BATCH = batch("b", 3)


def failed(times: int, *, shard: int = 0) -> ShardBackoff:
    backoff = ShardBackoff()
    for _ in range(times):
        backoff.record(BATCH, shard, "no image", NOW)
    return backoff


@pytest.mark.parametrize(
    ("times", "seconds"), [(0, 0.0), (1, 0.0), (2, 1.0), (3, 2.0), (4, 4.0), (99, 300.0)]
)
def test_the_first_failure_is_retried_at_once_and_later_waits_double(
    times: int, seconds: float
) -> None:
    assert failed(times).wait(BATCH, 0, NOW) == seconds


def test_the_wait_passes_and_other_shards_do_not_wait() -> None:
    backoff = failed(4)
    assert backoff.wait(BATCH, 0, NOW + timedelta(seconds=3)) == 1.0
    assert backoff.wait(BATCH, 0, NOW + timedelta(seconds=9)) == 0.0
    assert backoff.wait(BATCH, 1, NOW) == 0.0


def changed(found: BatchSandbox) -> BatchSandbox:
    meta = structs.replace(found.metadata, generation=found.metadata.generation + 1)
    return structs.replace(found, metadata=meta)


def test_a_changed_or_forgotten_batch_starts_again() -> None:
    backoff = failed(4)
    assert backoff.wait(changed(BATCH), 0, NOW) == 0.0
    backoff.forget(BATCH.key)
    assert backoff.wait(BATCH, 0, NOW) == 0.0


def test_a_failure_after_a_long_time_counts_as_the_first() -> None:
    backoff = failed(4)
    later = NOW + RESET_AFTER
    backoff.record(BATCH, 0, "no image", later)
    assert backoff.wait(BATCH, 0, later) == 0.0


def test_the_message_names_the_worst_shard_that_is_not_ready() -> None:
    backoff = failed(2, shard=1)
    assert backoff.message(BATCH, ready=()) == (
        "shard 1 failed 2 times; last error: no image; backoff 1 s"
    )
    assert backoff.message(BATCH, ready={1}) == ""
    assert failed(1).message(BATCH, ready=()) == ""
    for _ in range(3):
        backoff.record(BATCH, 2, "no disk", NOW)
    assert backoff.message(BATCH, ready=()) == (
        "shard 2 failed 3 times; last error: no disk; backoff 2 s (and 1 more)"
    )
