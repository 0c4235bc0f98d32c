"""Where a sidecar finds what its sandbox uses, as containers see cgroups of either version."""

import os
from pathlib import Path

import pytest

from paddock.runtime.kubernetes.sidecar.accounting import own_cgroups


def grow(root, *files):
    for name in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)


def seen(root, own):
    """Give what the meter would read, by kind: a file of each directory."""
    (root.parent / "own").write_text(own)
    found = own_cgroups(root=root, own=root.parent / "own")
    names = {}
    for kind, fd in found.items():
        names[kind] = str(Path(f"/proc/self/fd/{fd}").readlink().relative_to(root))
        os.close(fd)
    return names


@pytest.fixture
def root(tmp_path):
    (tmp_path / "cgroup").mkdir()
    return tmp_path / "cgroup"


def test_a_container_with_a_view_of_its_own_finds_itself_at_the_top(root):
    grow(root, "memory.current", "cpu.stat")
    assert seen(root, "0::/\n") == {"cgroup": "."}


def test_one_that_sees_the_whole_machine_follows_its_path(root):
    grow(root, "cpu.stat", "kubepods/pod1/c/memory.current", "kubepods/pod1/c/cpu.stat")
    assert seen(root, "0::/kubepods/pod1/c\n") == {"cgroup": "kubepods/pod1/c"}


def test_the_first_version_has_a_directory_for_each_kind(root):
    grow(root, "memory/x", "cpu,cpuacct/x", "unified/cgroup.procs")
    own = "4:memory:/kubepods/pod1/c\n3:cpu,cpuacct:/kubepods/pod1/c\n0::/\n"
    assert seen(root, own) == {"cgroup_memory": "memory", "cgroup_cpu": "cpu,cpuacct"}
    grow(root, "memory/kubepods/pod1/c/x")
    assert seen(root, own)["cgroup_memory"] == "memory/kubepods/pod1/c"


def test_where_nothing_counts_nothing_is_found(root):
    assert seen(root, "0::/\n1:freezer:/a\n") == {}
