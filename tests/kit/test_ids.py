"""Identifiers."""

import uuid
from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from paddock.kit import ids

START = datetime(2020, 1, 1, tzinfo=UTC)
MOMENTS = st.timedeltas(timedelta(0), timedelta(days=60_000)).map(lambda passed: START + passed)


@given(MOMENTS, st.integers(1, 10**9))
def test_ordered_uids_are_uuids_in_the_order_of_their_times(
    moment: datetime, microseconds: int
) -> None:
    earlier = ids.ordered_uid(moment)
    later = ids.ordered_uid(moment + timedelta(microseconds=microseconds))
    assert earlier < later
    assert (uuid.UUID(earlier).version, uuid.UUID(earlier).variant) == (7, uuid.RFC_4122)


def test_ordered_uids_of_one_moment_differ() -> None:
    now = datetime.now(UTC)
    assert len({ids.ordered_uid(now) for _ in range(100)}) == 100
