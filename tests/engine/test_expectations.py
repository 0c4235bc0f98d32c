"""What is expected is waited for, but never for ever."""

import pytest

from paddock.engine.expectations import ScaleExpectations, VersionExpectations
from paddock.kit.clock import ManualClock
from paddock.resources.kinds.builtin import Secret
from paddock.resources.meta import ObjectMeta


def at(version: int, uid: str = "u") -> Secret:
    return Secret(metadata=ObjectMeta(name="a", uid=uid, resource_version=str(version)))


def test_nothing_older_than_ones_own_write_is_acted_upon() -> None:
    expectations = VersionExpectations(ManualClock())
    assert expectations.is_satisfied(at(5))
    expectations.expect(at(7))
    assert not expectations.is_satisfied(at(6))
    assert expectations.is_satisfied(at(7))
    assert len(expectations) == 0


def test_a_conflict_makes_it_wait_for_something_newer_than_what_was_read() -> None:
    expectations = VersionExpectations(ManualClock())
    expectations.expect_newer(at(7))
    assert not expectations.is_satisfied(at(7))
    assert expectations.is_satisfied(at(9))


def test_an_older_expectation_never_lowers_a_newer_one() -> None:
    expectations = VersionExpectations(ManualClock())
    expectations.expect(at(9))
    expectations.expect(at(7))
    assert not expectations.is_satisfied(at(8))


def test_versions_are_compared_as_numbers() -> None:
    expectations = VersionExpectations(ManualClock())
    expectations.expect(at(10))
    assert not expectations.is_satisfied(at(9))


def test_objects_do_not_wait_for_each_other() -> None:
    expectations = VersionExpectations(ManualClock())
    expectations.expect(at(9, "one"))
    assert expectations.is_satisfied(at(1, "two"))
    expectations.forget(at(1, "one"))
    assert expectations.is_satisfied(at(1, "one"))


def test_a_version_that_never_comes_is_given_up_with_a_word(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = ManualClock()
    expectations = VersionExpectations(clock, timeout_seconds=60)
    expectations.expect(at(9))
    clock.advance(59)
    assert not expectations.is_satisfied(at(1))
    clock.advance(1)
    assert expectations.is_satisfied(at(1))
    assert "expected version never came" in caplog.text


def test_creations_and_deletions_are_pending_until_seen() -> None:
    expectations: ScaleExpectations[str] = ScaleExpectations(ManualClock())
    expectations.expect_creation("pool", "a")
    expectations.expect_creation("pool", "b")
    expectations.expect_deletion("pool", "u-c")
    assert expectations.pending_creations("pool") == 2
    assert not expectations.is_satisfied("pool")
    assert expectations.is_satisfied("other")
    expectations.saw_creation("pool", "a")
    expectations.saw_creation("pool", "a")
    expectations.saw_creation("pool", "unknown")
    assert expectations.pending_creations("pool") == 1
    expectations.saw_creation("pool", "b")
    assert expectations.pending_deletions("pool") == 1
    expectations.saw_deletion("pool", "u-c")
    assert expectations.is_satisfied("pool")
    assert len(expectations) == 0


def test_a_child_that_is_never_seen_is_given_up_and_the_others_are_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = ManualClock()
    expectations: ScaleExpectations[str] = ScaleExpectations(clock, timeout_seconds=60)
    expectations.expect_creation("pool", "lost")
    clock.advance(30)
    expectations.expect_creation("pool", "late")
    clock.advance(30)
    assert expectations.pending_creations("pool") == 1
    clock.advance(30)
    assert expectations.is_satisfied("pool")
    assert caplog.text.count("expected change was never seen") == 2
    assert len(expectations) == 0


def test_an_owner_that_is_gone_is_forgotten() -> None:
    expectations: ScaleExpectations[str] = ScaleExpectations(ManualClock())
    expectations.expect_creation("pool", "a")
    expectations.expect_deletion("pool", "b")
    expectations.forget("pool")
    assert expectations.is_satisfied("pool")
    assert len(expectations) == 0
