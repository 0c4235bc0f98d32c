"""The sidecar finds the cgroups of its sandbox, with cgroup v1 and v2."""

import os
from pathlib import Path

import pytest

from paddock.runtime.kubernetes.sidecar.accounting import own_cgroups


def grow(root, *files):
    for name in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)


def seen(root, own):
    """Return the directories that the meter would read, relative to the root."""
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


def test_with_a_cgroup_namespace_the_own_cgroup_is_the_root(root):
    grow(root, "memory.current", "cpu.stat")
    assert seen(root, "0::/\n") == {"cgroup": "."}


def test_without_a_cgroup_namespace_the_path_is_followed(root):
    grow(root, "cpu.stat", "kubepods/pod1/c/memory.current", "kubepods/pod1/c/cpu.stat")
    assert seen(root, "0::/kubepods/pod1/c\n") == {"cgroup": "kubepods/pod1/c"}


def test_version_1_has_a_directory_per_controller(root):
    grow(root, "memory/x", "cpu,cpuacct/x", "unified/cgroup.procs")
    own = "4:memory:/kubepods/pod1/c\n3:cpu,cpuacct:/kubepods/pod1/c\n0::/\n"
    assert seen(root, own) == {"cgroup_memory": "memory", "cgroup_cpu": "cpu,cpuacct"}
    grow(root, "memory/kubepods/pod1/c/x")
    assert seen(root, own)["cgroup_memory"] == "memory/kubepods/pod1/c"


def test_without_accounting_nothing_is_found(root):
    assert seen(root, "0::/\n1:freezer:/a\n") == {}
