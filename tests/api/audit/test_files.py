"""Files of the audit log: bounded, private, whole lines only."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paddock.api.audit.files import AuditFiles, AuditStream
from tests.disks import mount, unmount

LINE = b'{"line": "%04d"}\n'


def files(directory: Path, *, max_bytes: int = 1 << 20, count: int = 3) -> AuditFiles:
    return AuditFiles(directory, max_bytes=max_bytes, count=count)


def test_files_are_rotated_by_size_and_bounded_in_number(tmp_path: Path) -> None:
    sink = files(tmp_path, max_bytes=10 * len(LINE % 0))
    for number in range(55):
        sink.write(LINE % number)
    sink.close()
    names = sorted(path.name for path in tmp_path.glob("audit-*.log*"))
    assert names == ["audit-0.log", "audit-0.log.1", "audit-0.log.2"]
    kept = b"".join((tmp_path / name).read_bytes() for name in reversed(names))
    assert kept == b"".join(LINE % number for number in range(30, 55))


def test_one_file_is_replaced_when_it_is_full(tmp_path: Path) -> None:
    sink = files(tmp_path, max_bytes=2 * len(LINE % 0), count=1)
    for number in range(5):
        sink.write(LINE % number)
    sink.close()
    assert [path.name for path in tmp_path.glob("*.log*")] == ["audit-0.log"]
    assert (tmp_path / "audit-0.log").read_bytes() == LINE % 4


def test_a_lower_number_of_files_applies_to_old_files(tmp_path: Path) -> None:
    for age in range(1, 6):
        (tmp_path / f"audit-0.log.{age}").write_bytes(b"{}\n")
    sink = files(tmp_path, count=2)
    sink.write(LINE % 1)
    sink.close()
    assert {path.name for path in tmp_path.glob("*.log*")} == {"audit-0.log", "audit-0.log.1"}


def test_only_the_owner_can_read(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        sink = files(tmp_path / "new" / "audit", max_bytes=20)
        sink.write(LINE % 1)
        sink.write(LINE % 2)
        sink.close()
    finally:
        os.umask(before)
    assert (tmp_path / "new" / "audit").stat().st_mode & 0o777 == 0o700
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "new" / "audit").iterdir()}
    assert modes == {0o600}


def test_after_a_crash_within_a_line_the_next_line_is_whole(tmp_path: Path) -> None:
    (tmp_path / "audit-0.log").write_bytes(LINE % 1 + b'{"line": "cut o')
    sink = files(tmp_path)
    sink.write(LINE % 2)
    sink.close()
    lines = (tmp_path / "audit-0.log").read_bytes().splitlines(keepends=True)
    assert lines == [LINE % 1, b'{"line": "cut o\n', LINE % 2]


def test_a_killed_process_loses_no_line_that_was_written(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys\nfrom pathlib import Path\n"
        "from paddock.api.audit.files import AuditFiles\n"
        "sink = AuditFiles(Path(sys.argv[1]), max_bytes=1 << 20, count=2)\n"
        "for number in range(100): sink.write(b'%d\\n' % number)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert ended.returncode == -9
    sink = files(tmp_path)
    sink.write(b"100\n")
    sink.close()
    lines = (tmp_path / "audit-0.log").read_bytes().split()
    assert lines == [b"%d" % number for number in range(101)]


def test_processes_write_to_files_of_their_own(tmp_path: Path) -> None:
    first, second = files(tmp_path), files(tmp_path)
    first.write(LINE % 1)
    second.write(LINE % 2)
    first.close()
    third = files(tmp_path)
    third.write(LINE % 3)
    for sink in (second, third):
        sink.close()
    assert (tmp_path / "audit-0.log").read_bytes() == LINE % 1 + LINE % 3
    assert (tmp_path / "audit-1.log").read_bytes() == LINE % 2


def test_a_deleted_file_is_created_again(tmp_path: Path) -> None:
    sink = files(tmp_path)
    sink.write(LINE % 1)
    (tmp_path / "audit-0.log").unlink()
    sink.check()
    sink.write(LINE % 2)
    sink.close()
    assert (tmp_path / "audit-0.log").read_bytes() == LINE % 2


def test_a_link_in_place_of_the_file_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    (tmp_path / "audit-0.log").symlink_to(target)
    sink = files(tmp_path)
    with pytest.raises(OSError, match="symbolic link"):
        sink.write(LINE % 1)
    sink.close()
    assert not target.exists()


def fill(sink: AuditFiles) -> int:
    """Write until the disk is full; return how many lines were written."""
    for number in range(10_000):
        try:
            sink.write(LINE % number)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            return number
    raise AssertionError("the disk is too large")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_full_disk_leaves_whole_lines_and_is_left_when_there_is_space(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount(disk, "16k")
    sink = files(disk)
    try:
        number = fill(sink)
        data = (disk / "audit-0.log").read_bytes()
        assert data == b"".join(LINE % index for index in range(number))
        with pytest.raises(OSError, match="No space"):
            sink.write(LINE % number)
        (disk / "audit-0.log").unlink()
        sink.write(LINE % number)
        assert (disk / "audit-0.log").read_bytes() == LINE % number
    finally:
        sink.close()
        unmount(disk)


def test_a_stream_gets_whole_lines_and_its_errors_are_raised() -> None:
    reader, writer = os.pipe()
    AuditStream(writer).write(LINE % 1)
    assert os.read(reader, 100) == LINE % 1
    os.close(reader)
    os.close(writer)
    with (
        Path("/dev/full").open("wb", buffering=0) as full,
        pytest.raises(OSError, match="No space"),
    ):
        AuditStream(full.fileno()).write(LINE % 1)
