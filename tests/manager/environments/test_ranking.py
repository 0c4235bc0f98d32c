"""The order of the members of an environment, case by case."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from paddock.cache.environments import MemberSnapshot
from paddock.manager.environments.member_choice import (
    STALE_SECONDS,
    MemberCandidate,
    candidate,
    choose,
    choose_federated,
)
from paddock.resources.meta import Key

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def member(name: str = "a", **given: Any) -> MemberCandidate:
    return MemberCandidate(name=name, pool=Key("default", name), **given)


@pytest.mark.parametrize(
    ("best", "other"),
    [
        ({"idle": 1, "priority": 9}, {"idle": 0, "priority": 0, "headroom": 9}),
        ({"idle": 1, "priority": 0}, {"idle": 9, "priority": 1}),
        ({"idle": 2}, {"idle": 1}),
        ({"headroom": 1, "priority": 9}, {"headroom": 0, "priority": 0}),
        ({"headroom": None}, {"headroom": 1000}),
        ({"headroom": 1}, {"headroom": 5, "is_saturated": True}),
        ({"idle": 1, "queue": 0}, {"idle": 1, "queue": 3}),
        ({"headroom": 1}, {"idle": 9, "is_stale": True}),
    ],
)
def test_the_better_member_is_chosen(best: dict[str, object], other: dict[str, object]) -> None:
    # By name the other one would be first: the criteria before the name decide.
    good, bad = member("z", **best), member("a", **other)
    assert choose((bad, good)) is good
    assert choose((good, bad)) is good


def test_equal_members_are_chosen_by_name() -> None:
    assert choose((member("b", idle=1), member("a", idle=1))) == member("a", idle=1)


@pytest.mark.parametrize(
    ("here", "there", "wanted"),
    [
        ({"idle": 1}, {"idle": 9}, "here"),
        ({"headroom": 9}, {"idle": 1}, "there"),
        ({"headroom": 1}, {"headroom": 9}, "here"),
        ({}, {"headroom": 1}, "there"),
        ({}, {}, None),
        ({}, {"idle": 9, "is_stale": True}, None),
        ({"idle": 1, "is_stale": True}, {"idle": 9}, "here"),
    ],
)
def test_other_clusters_serve_what_this_one_cannot(
    here: dict[str, object], there: dict[str, object], wanted: str | None
) -> None:
    found = choose_federated((member("here", **here), member("there", cluster="east", **there)))
    assert (found.name if found else None) == wanted


@pytest.mark.parametrize(
    ("given", "room"),
    [
        ({"idle": 1, "pending": 2, "headroom": 3}, 6),
        ({"idle": 1, "pending": 2, "headroom": 3, "is_saturated": True}, 3),
        ({}, 0),
    ],
)
def test_room_counts_idle_pending_and_headroom(given: dict[str, object], room: int) -> None:
    assert member(**given).room == room


@pytest.mark.parametrize(
    ("age", "saturated", "is_stale", "is_saturated"),
    [
        (0, None, False, False),
        (STALE_SECONDS, None, False, False),
        (STALE_SECONDS + 1, None, True, False),
        (0, 1, False, True),
        (0, 0, False, False),
        (0, -1, False, False),
    ],
)
def test_age_and_saturation_are_read_from_the_snapshot(
    age: float, saturated: float | None, is_stale: bool, is_saturated: bool
) -> None:
    until = None if saturated is None else NOW + timedelta(seconds=saturated)
    snapshot = MemberSnapshot(
        name="a",
        pool=Key("default", "a"),
        priority=0,
        scaling_group="default",
        idle=4,
        pending=0,
        headroom=0,
        saturated_until=until,
    )
    found = candidate(snapshot, now=NOW, taken_at=NOW - timedelta(seconds=age), idle=2)
    assert (found.is_stale, found.is_saturated, found.idle) == (is_stale, is_saturated, 2)
