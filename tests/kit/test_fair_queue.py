"""`FairQueue` hands items out in turns of groups and lanes."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddock.kit.fair.queue import FairQueue, may_start


def drain(queue: FairQueue[str]) -> list[str]:
    out: list[str] = []
    while (found := queue.pop()) is not None:
        out.append(found[1])
    return out


@pytest.mark.parametrize(
    ("pushed", "order"),
    [
        ("a1 a2 a3", "a1 a2 a3"),
        ("a1 a2 a3 b1", "a1 b1 a2 a3"),
        ("a1 a2 b1 b2 c1", "a1 b1 c1 a2 b2"),
        ("a1:dump a2:dump a3:restore", "a1 a3 a2"),
        ("a1:fork a2:fork a3:fork a4:dump b1:restore b2:fork", "a1 b1 a4 b2 a2 a3"),
    ],
)
def test_groups_and_their_lanes_take_turns(pushed: str, order: str) -> None:
    queue: FairQueue[str] = FairQueue()
    for word in pushed.split():
        item, _, lane = word.partition(":")
        queue.push(item[0], item, lane)
    assert drain(queue) == order.split()
    assert len(queue) == 0


def test_a_group_that_may_not_start_keeps_its_place() -> None:
    queue: FairQueue[str] = FairQueue()
    for item in ("a1", "b1", "b2"):
        queue.push(item[0], item)
    assert queue.pop(lambda group: group != "a") == ("b", "b1")
    assert queue.pop(lambda _: False) is None
    assert drain(queue) == ["a1", "b2"]


def test_a_removed_item_is_not_handed_out() -> None:
    queue: FairQueue[str] = FairQueue()
    for item in ("a1", "a2", "b1"):
        queue.push(item[0], item)
    assert queue.remove("a", "a1")
    assert not queue.remove("a", "a1")
    assert not queue.remove("c", "c1")
    assert (len(queue), queue.count("a"), queue.count("c")) == (2, 1, 0)
    assert drain(queue) == ["a2", "b1"]


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(["dump", "fork"])), max_size=60))
def test_nothing_is_lost_and_no_group_is_passed_twice(pushed: list[tuple[str, str]]) -> None:
    queue: FairQueue[int] = FairQueue()
    for number, (group, lane) in enumerate(pushed):
        queue.push(group, number, lane)
    left = Counter(group for group, _ in pushed)
    passed: dict[str, Counter[str]] = {group: Counter() for group in left}
    seen: dict[tuple[str, str], int] = {}
    while (found := queue.pop()) is not None:
        group, number = found
        left[group] -= 1
        # Items of one lane stay in order.
        assert seen.get(pushed[number], -1) < number
        seen[pushed[number]] = number
        for other, count in left.items():
            if other != group and count:
                passed[other][group] += 1
                assert passed[other][group] <= 1, "one group was served twice before another"
        passed[group].clear()
    assert not +left


@pytest.mark.parametrize(
    ("running", "free", "allowed"),
    [(0, 1, True), (0, 0, False), (1, 1, False), (1, 2, True), (4, 4, False), (3, 5, True)],
)
def test_a_group_leaves_as_many_slots_free_as_it_holds(
    running: int, free: int, *, allowed: bool
) -> None:
    assert may_start(running, free) is allowed
