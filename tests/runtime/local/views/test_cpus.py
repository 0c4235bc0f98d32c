"""CPUs are given to sandboxes by their limit, spread evenly."""

from collections import Counter

from paddock.runtime.local.views.cpus import CpuChoice


def test_a_limit_is_rounded_up_to_whole_cpus():
    cpus = CpuChoice(range(8))
    assert [cpus.count(millis) for millis in (1, 1000, 1001, 7999)] == [1, 1, 2, 8]


def test_no_limit_and_a_large_one_leave_all_cpus():
    cpus = CpuChoice(range(4))
    assert cpus.choose("a", None) == cpus.choose("b", 0) == cpus.choose("c", 64_000) == cpus.all


def test_sandboxes_are_spread_over_all_cpus():
    cpus = CpuChoice(range(8))
    chosen = [cpus.choose(f"s{number}", 2000) for number in range(40)]
    assert set(Counter(cpu for one in chosen for cpu in one).values()) == {10}


def test_a_released_cpu_is_chosen_next():
    cpus = CpuChoice(range(3))
    first, _, _ = (cpus.choose(name, 1000) for name in "abc")
    cpus.release("a")
    assert cpus.choose("d", 1000) == first


def test_a_slot_keeps_its_cpus_while_their_number_stays():
    cpus = CpuChoice(range(4))
    before = cpus.choose("a", 1500)
    cpus.choose("b", 1000)
    assert cpus.choose("a", 2000) == before
    assert len(cpus.choose("a", 500)) == 1


def test_adopted_sandboxes_count():
    cpus = CpuChoice(range(2))
    cpus.assign("old", {0}, 1000)
    assert cpus.choose("new", 1000) == {1}
