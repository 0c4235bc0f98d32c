"""Versions, tombstones, takeover, deadlines: routes never go back to an older version."""

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from paddock.cache.states import SandboxState
from paddock.gateway.routing.routes import TOMBSTONE_SECONDS, RouteTable
from paddock.kit.clock import ManualClock
from paddock.resources.meta import Key
from tests.gateway.rig import route


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def table(clock: ManualClock) -> RouteTable:
    return RouteTable(clock)


def test_only_a_strictly_newer_version_changes_a_route(table: RouteTable) -> None:
    assert table.put(route(version=5))
    assert not table.put(route(version=5, owner="late"))
    assert not table.put(route(version=4, owner="older"))
    assert table.put(route(version=6, owner="newer"))
    assert table.get("abc").owner == "newer"


def test_a_deleted_route_leaves_a_fence_that_expires(table, clock) -> None:
    table.put(route(version=5))
    table.remove(Key("default", "abc"), 7)
    assert table.get("abc") is None
    assert not table.put(route(version=7))
    assert not table.put(route(version=6))
    assert table.put(route(version=8))
    table.remove(Key("default", "abc"), 9)
    clock.advance(TOMBSTONE_SECONDS + 61)
    assert table.put(route("other"))
    assert table.put(route(version=9))


def test_a_late_deletion_does_not_remove_a_newer_route(table: RouteTable) -> None:
    table.put(route(version=5))
    table.remove(Key("default", "abc"), 4)
    assert table.get("abc") is not None


def test_a_lower_fence_does_not_replace_a_higher_one(table: RouteTable) -> None:
    table.remove(Key("default", "abc"), 9)
    table.remove(Key("default", "abc"), 5)
    assert not table.put(route(version=7))


def test_a_dead_sandbox_has_no_route(table: RouteTable) -> None:
    table.put(route(version=5))
    assert table.put(route(version=6, state=SandboxState.DEAD))
    assert table.get("abc") is None
    assert not table.put(route(version=6))


def test_a_sandbox_past_its_deadline_has_no_route(table, clock) -> None:
    table.put(route(ends_at=clock.now() + timedelta(seconds=5)))
    assert table.get("abc") is not None
    clock.advance(5)
    assert table.get("abc") is None


def test_of_two_objects_with_one_id_the_newer_one_wins(table: RouteTable) -> None:
    first = route(version=5)
    second = route(version=6, key=Key("default", "twin"), uid="uid-twin")
    table.put(first)
    table.put(second)
    assert table.get("abc").uid == "uid-twin"
    # Updates of the displaced object do not take the id back with an older version.
    table.put(structs.replace(first, version=5))
    assert table.get("abc").uid == "uid-twin"
    # When the newer object is removed, the id has no route until the next update.
    table.remove(second.key, 8)
    assert table.get("abc") is None
    table.put(structs.replace(first, version=9))
    assert table.get("abc").uid == "uid-abc"


def test_listeners_get_the_old_and_the_new_route(table: RouteTable) -> None:
    heard = []
    table.on_change(lambda old, new: heard.append((old and old.version, new and new.version)))
    table.put(route(version=1))
    table.put(route(version=2))
    table.remove(Key("default", "abc"), 3)
    assert heard == [(None, 1), (1, 2), (2, None)]


messages = st.lists(
    st.tuples(
        st.sampled_from(["put", "remove"]),
        st.sampled_from(["a", "b"]),
        st.sampled_from(["x", "y"]),
        st.integers(1, 12),
    ),
    max_size=30,
)


@given(messages, st.randoms(use_true_random=False))
def test_tables_converge_whatever_the_order_of_updates(news, random) -> None:
    # Each version of an object exists once.
    history = {(key, version): (kind, key, name, version) for kind, key, name, version in news}
    first, second = RouteTable(ManualClock()), RouteTable(ManualClock())
    shuffled = list(history.values()) * 2
    random.shuffle(shuffled)
    for table, order in ((first, sorted(history.values(), key=lambda m: m[3])), (second, shuffled)):
        for kind, key, name, version in order:
            if kind == "put":
                table.put(route(name, key=Key("d", key), uid=key, version=version))
            else:
                table.remove(Key("d", key), version)
    assert {key: item.version for key, item in first._by_key.items()} == {
        key: item.version for key, item in second._by_key.items()
    }
