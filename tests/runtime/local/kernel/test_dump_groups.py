"""The cgroups in which a sandbox is dumped, for each layout of hierarchies."""

from pathlib import Path

from paddock.runtime.local.kernel.cgroups import CgroupLayout, Cgroups
from paddock.runtime.port import Limits

LIMITS = Limits(cpu_millis=500)


def test_on_v1_the_dump_joins_the_cpu_cgroups_of_the_sandbox() -> None:
    v1 = {"cpu": "/c/cpu", "cpuacct": "/c/cpu", "memory": "/c/memory"}
    groups = Cgroups("n", CgroupLayout("/c/unified", frozenset(), v1))
    # Not the v2 cgroup, which is frozen during the dump, and not that of memory.
    assert groups.dump_groups("s1", LIMITS) == ["-", "/c/cpu/paddock-n/s1"]


def test_on_v2_the_dump_has_a_cgroup_with_the_same_limit_beside_the_sandbox(
    tmp_path: Path,
) -> None:
    groups = Cgroups("n", CgroupLayout(str(tmp_path), frozenset({"cpu"}), {}))
    beside = tmp_path / "paddock-n" / "s1-dump"
    beside.mkdir(parents=True)
    (beside / "cpu.max").touch()
    assert groups.dump_groups("s1", LIMITS) == [str(beside)]
    assert (beside / "cpu.max").read_text() == "50000 100000"
    # A sweep finds what a killed node left, by the name of the sandbox.
    assert groups.names() == {"s1"}
    (beside / "cpu.max").unlink()
    assert groups.remove("s1")
    assert not beside.exists()


def test_without_cgroups_the_dump_runs_in_those_of_the_node() -> None:
    assert Cgroups("n", CgroupLayout(None, frozenset(), {})).dump_groups("s1", LIMITS) == []
    assert Cgroups("n", CgroupLayout("/c", frozenset(), {})).dump_groups("s1", LIMITS) == []
