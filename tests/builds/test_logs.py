"""Logs of builds: order, levels, bounds, restarts."""

import errno
import os
import stat
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddock.builds.logs import MAX_MESSAGE, BuildLogs
from paddock.kit.clock import ManualClock


@pytest.fixture
def logs(tmp_path: Path) -> BuildLogs:
    return BuildLogs(tmp_path / "logs", ManualClock())


def messages(logs: BuildLogs, **options: object) -> list[str]:
    return [entry.message for entry in logs.read("b1", **options)]  # type: ignore[arg-type]


def test_entries_are_read_in_order_by_offset_and_limit(logs: BuildLogs) -> None:
    for number in range(5):
        logs.append("b1", f"line {number}", step="1")
    assert messages(logs) == [f"line {number}" for number in range(5)]
    assert messages(logs, offset=3, limit=1) == ["line 3"]
    assert messages(logs, offset=5) == []


def test_the_offset_counts_entries_of_the_requested_level(logs: BuildLogs) -> None:
    for level in ("debug", "warn", "info", "error"):
        logs.append("b1", level, level=level)
    assert messages(logs, level="warn") == ["warn", "error"]
    assert messages(logs, level="warn", offset=1) == ["error"]


def test_a_message_that_looks_like_a_level_is_none(logs: BuildLogs) -> None:
    logs.append("b1", '{"level":"error"}')
    assert messages(logs, level="warn") == []


def test_a_message_may_contain_line_breaks(logs: BuildLogs) -> None:
    logs.append("b1", "first\nsecond")
    assert messages(logs) == ["first\nsecond"]


def test_a_full_log_ends_with_the_reason_and_still_takes_errors(tmp_path: Path) -> None:
    logs = BuildLogs(tmp_path, ManualClock(), max_lines=3)
    for number in range(9):
        logs.append("b1", f"line {number}")
    logs.append("b1", "failed", level="error")
    kept = messages(logs)
    assert kept[:3] == ["line 0", "line 1", "line 2"]
    assert kept[3].startswith("The log is full (3 lines")
    assert kept[4:] == ["failed"]


def test_errors_cannot_fill_the_disk_either(tmp_path: Path) -> None:
    logs = BuildLogs(tmp_path, ManualClock(), max_bytes=1000)
    for _ in range(200):
        logs.append("b1", "x" * 4000, level="error")
    assert (tmp_path / "b1.jsonl").stat().st_size < 400_000


def test_a_long_message_is_cut_off(logs: BuildLogs) -> None:
    logs.append("b1", "x" * (MAX_MESSAGE + 7))
    assert messages(logs)[0].endswith("… (7 characters cut off)")


def test_another_process_continues_a_log_and_removes_half_a_line(tmp_path: Path) -> None:
    BuildLogs(tmp_path, ManualClock(), max_lines=2).append("b1", "one")
    with (tmp_path / "b1.jsonl").open("ab") as file:
        file.write(b'{"timest')
    second = BuildLogs(tmp_path, ManualClock(), max_lines=2)
    assert messages(second) == ["one"]
    for text in ("two", "three", "four"):
        second.append("b1", text)
    assert messages(second)[:2] == ["one", "two"]
    assert len(messages(second)) == 3


def test_only_the_owner_can_read_a_log(logs: BuildLogs, tmp_path: Path) -> None:
    logs.append("b1", "text")
    file = tmp_path / "logs" / "b1.jsonl"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_removed_logs_are_gone(logs: BuildLogs) -> None:
    logs.append("b1", "text")
    assert logs.uids() == {"b1"}
    logs.remove("b1")
    logs.remove("b1")
    assert logs.uids() == frozenset()
    assert messages(logs) == []


@pytest.mark.parametrize("uid", ["", "../x", "a/b", "a.b"])
def test_a_name_that_is_no_uid_is_refused(logs: BuildLogs, uid: str) -> None:
    with pytest.raises(ValueError, match="is not the UID of a build"):
        logs.append(uid, "text")


@given(
    st.integers(0, 300), st.integers(0, 320), st.integers(0, 120), st.booleans(), st.integers(0, 40)
)
def test_every_page_is_that_part_of_the_log(
    count: int, offset: int, limit: int, is_restarted: bool, size: int
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        logs = BuildLogs(Path(directory), ManualClock())
        for number in range(count):
            logs.append("b1", f"line {number}" + "ü\n\r" * size)
        if is_restarted:
            logs = BuildLogs(Path(directory), ManualClock())
        found = [item.message.split("ü")[0] for item in logs.read("b1", offset=offset, limit=limit)]
        assert found == [f"line {number}" for number in range(count)][offset : offset + limit]
        logs.append("b1", "after")
        assert messages(logs, offset=count) == ["after"]


def test_polling_the_end_of_a_log_opens_no_file(
    logs: BuildLogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(1000):
        logs.append("b1", f"line {number}")
    monkeypatch.setattr(Path, "open", lambda *_: pytest.fail("the file was opened"))
    assert messages(logs, offset=1000) == []
    assert messages(logs, offset=5000) == []


def test_a_full_disk_leaves_whole_lines_and_does_not_fail_the_build(
    logs: BuildLogs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    logs.append("b1", "before")
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:9]))
        logs.append("b1", "cut off")
    with monkeypatch.context() as full:
        full.setattr(os, "write", no_space)
        logs.append("b1", "lost")
    logs.append("b1", "after")
    assert messages(logs) == ["before", "after"]
    assert messages(BuildLogs(tmp_path / "logs", ManualClock())) == ["before", "after"]


def no_space(_descriptor: int, _data: bytes) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_line_that_cannot_be_read_does_not_hide_the_others(
    logs: BuildLogs, tmp_path: Path
) -> None:
    logs.append("b1", "before")
    with (tmp_path / "logs" / "b1.jsonl").open("ab") as file:
        file.write(b'{"timestamp":\n\xff\n')
    again = BuildLogs(tmp_path / "logs", ManualClock())
    again.append("b1", "after")
    unreadable = "(this line cannot be read)"
    assert messages(again) == ["before", unreadable, unreadable, "after"]
    assert messages(again, offset=3) == ["after"]
