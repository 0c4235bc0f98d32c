"""Whether time passed in which the process could not run."""

from code_interpreter.e2b.freezes import Reading, has_jumped

BEFORE = Reading(clock=100.0, on_cpu=5.0, waited=1.0)


def test_sleep_work_and_waiting_for_a_cpu_are_no_freeze() -> None:
    assert not has_jumped(BEFORE, Reading(100.1, 5.0, 1.0), slept=0.1)
    assert not has_jumped(BEFORE, Reading(103.1, 8.0, 1.0), slept=0.1)
    assert not has_jumped(BEFORE, Reading(110.1, 5.0, 11.0), slept=0.1)


def test_a_jump_of_the_clock_is_a_freeze() -> None:
    assert has_jumped(BEFORE, Reading(100.4, 5.0, 1.0), slept=0.1)
    assert has_jumped(BEFORE, Reading(3700.0, 5.0, 1.5), slept=0.1)


def test_a_restored_process_was_frozen() -> None:
    assert has_jumped(BEFORE, Reading(100.1, 0.0, 0.0), slept=0.1)
