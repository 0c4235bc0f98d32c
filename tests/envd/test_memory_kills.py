"""The cause of OOM kills, read from both versions of cgroups."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from paddock.envd.memory_kills import MemoryKills, from_usage_files, size

GIB = 1 << 30


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY)
    yield fd
    os.close(fd)


def write(tmp_path: Path, **files: object) -> None:
    for name, text in files.items():
        (tmp_path / name.replace("__", ".")).write_text(f"{text}\n")


@pytest.mark.parametrize(
    ("limit", "oom", "cause"),
    [
        (GIB, 1, "the sandbox used its 1 GiB of memory"),
        ("max", 0, "the machine ran out of memory"),
        (GIB, 0, "the machine ran out of memory"),
    ],
)
def test_version_2(tmp_path: Path, directory: int, limit: object, oom: int, cause: str) -> None:
    write(tmp_path, memory__max=limit, memory__events=f"max 7\noom {oom}\noom_kill 2")
    kills = from_usage_files({"cgroup": directory})
    assert kills is not None
    assert (kills.count(), kills.cause()) == (2, cause)


@pytest.mark.parametrize(
    ("limit", "most", "cause"),
    [
        (GIB, GIB - 4096, "the sandbox used its 1 GiB of memory"),
        (9223372036854771712, 5 * GIB, "the machine ran out of memory"),
        (GIB, GIB // 2, "the machine ran out of memory"),
    ],
)
def test_version_1(tmp_path: Path, directory: int, limit: int, most: int, cause: str) -> None:
    write(
        tmp_path,
        memory__limit_in_bytes=limit,
        memory__max_usage_in_bytes=most,
        memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 3",
    )
    kills = from_usage_files({"cgroup_memory": directory, "cgroup_cpu": directory})
    assert kills is not None
    assert (kills.count(), kills.cause()) == (3, cause)


def test_a_removed_cgroup_has_no_kills(directory: int) -> None:
    assert MemoryKills(directory, True).count() == 0
    assert from_usage_files(None) is None


def test_sizes_are_short() -> None:
    assert [size(n) for n in (GIB, 3 * GIB // 2, 300 << 20, 2048, 12)] == [
        "1 GiB",
        "1.5 GiB",
        "300 MiB",
        "2 KiB",
        "12 bytes",
    ]


def test_the_limit_of_a_pod_is_above_the_cgroup(tmp_path: Path, directory: int) -> None:
    write(tmp_path, memory__max="max", memory__events="oom 0\noom_kill 1")
    kills = from_usage_files({"cgroup": directory}, GIB // 2)
    assert kills is not None
    assert kills.cause() == "the sandbox used its 512 MiB of memory"
