"""Whether threads share their descriptors, and the data in sockets of a cgroup."""

import ctypes
import errno
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from paddock.runtime.local.kernel import syscalls
from paddock.runtime.local.kernel.cgroups import Cgroups


@pytest.mark.parametrize(("flags", "expected"), [(0, True), (0x400, False)])
def test_threads_share_their_descriptors_unless_one_leaves(flags: int, expected: bool):
    libc = ctypes.CDLL(None, use_errno=True)
    ready, done = threading.Event(), threading.Event()
    tids: list[int] = []

    def work() -> None:
        assert flags == 0 or libc.unshare(flags) == 0  # CLONE_FILES
        tids.append(threading.get_native_id())
        ready.set()
        done.wait(10)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert ready.wait(10)
        assert syscalls.same_descriptors(os.getpid(), tids[0]) is expected
        assert syscalls.same_descriptors(tids[0], tids[0])
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize(
    ("code", "expected"), [(errno.ENOSYS, True), (errno.EPERM, True), (errno.ESRCH, False)]
)
def test_unknown_tables_count_as_shared_and_those_of_exited_threads_do_not(
    monkeypatch, code: int, expected: bool
):
    def fails(*_: object) -> int:
        raise OSError(code, "kcmp")

    monkeypatch.setattr(syscalls, "_call", fails)
    assert syscalls.same_descriptors(1, 2) is expected


@pytest.mark.parametrize(
    ("version", "file", "text", "expected"),
    [
        (2, "memory.stat", "anon 5\nsock 4096\nshmem 1\n", 4096),
        (2, "memory.stat", "anon 5\n", 0),
        (1, "memory.kmem.tcp.usage_in_bytes", "8192\n", 8192),
        (1, "another", "1\n", 0),
    ],
)
def test_data_in_sockets_is_read_from_the_memory_cgroup(
    tmp_path: Path, version: int, file: str, text: str, expected: int
):
    (tmp_path / file).write_text(text)
    layout = SimpleNamespace(v2={"memory"} if version == 2 else set())
    groups = SimpleNamespace(layout=layout, _at=lambda controller, name: str(tmp_path))

    assert Cgroups.socket_bytes(groups, "s1") == expected  # type: ignore[arg-type]
