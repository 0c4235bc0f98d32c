"""CPUs are given to sandboxes by their limit, spread evenly, and busy sandboxes are moved."""

from collections import Counter

from paddock.runtime.local.views.balance import CpuUse, plan
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


def use(used: float, *cpus: int) -> CpuUse:
    return CpuUse(frozenset(cpus), used)


def test_one_of_two_busy_sandboxes_on_a_cpu_moves_to_an_idle_one():
    uses = {"a": use(0.5, 0), "b": use(0.5, 0), "c": use(0.0, 1)}
    assert plan(uses, range(2)) == {"a": frozenset({1})}


def test_balanced_and_lightly_used_cpus_are_left_alone():
    assert plan({"a": use(1.0, 0), "b": use(0.9, 1)}, range(2)) == {}
    assert plan({"a": use(0.1, 0), "b": use(0.1, 0)}, range(2)) == {}
    assert plan({"only": use(1.0, 0)}, range(2)) == {}


def test_a_move_keeps_the_number_of_cpus_and_evens_the_load():
    uses = {f"s{number}": use(0.5, 0, 1) for number in range(8)} | {"idle": use(0.0, 2, 3)}
    moved = plan(uses, range(4))
    now = {name: moved.get(name, one.cpus) for name, one in uses.items()}
    assert all(len(cpus) == 2 for cpus in now.values())
    loads = Counter(dict.fromkeys(range(4), 0.0))
    for name, cpus in now.items():
        for cpu in cpus:
            loads[cpu] += uses[name].used / 2
    assert max(loads.values()) - min(loads.values()) <= 0.5


def test_a_moved_slot_counts_on_its_new_cpus():
    cpus = CpuChoice(range(2))
    assert cpus.choose("a", 1000) == {0}
    cpus.move("a", frozenset({1}))
    assert cpus.restricted("a") == {1}
    assert cpus.choose("b", 1000) == {0}
