"""Logs of builds: order, levels, bounds, restarts."""

import asyncio
import errno
import os
import stat
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddock.builds import log_files
from paddock.builds.log_files import MAX_MESSAGE
from paddock.builds.logs import BuildLogs
from paddock.kit.clock import ManualClock
from paddock.kit.errors import DiskFullError


@pytest.fixture
def logs(tmp_path: Path) -> BuildLogs:
    return BuildLogs(tmp_path / "logs", ManualClock())


async def messages(logs: BuildLogs, **options: object) -> list[str]:
    found = await logs.read("b1", **options)  # type: ignore[arg-type]
    return [entry.message for entry in found]


async def test_entries_are_read_in_order_by_offset_and_limit(logs: BuildLogs) -> None:
    for number in range(5):
        logs.append("b1", f"line {number}", step="1")
    assert await messages(logs) == [f"line {number}" for number in range(5)]
    assert await messages(logs, offset=3, limit=1) == ["line 3"]
    assert await messages(logs, offset=5) == []


async def test_the_offset_counts_entries_of_the_requested_level(logs: BuildLogs) -> None:
    for level in ("debug", "warn", "info", "error"):
        logs.append("b1", level, level=level)
    assert await messages(logs, level="warn") == ["warn", "error"]
    assert await messages(logs, level="warn", offset=1) == ["error"]


async def test_a_message_that_looks_like_a_level_is_none(logs: BuildLogs) -> None:
    logs.append("b1", '{"level":"error"}')
    assert await messages(logs, level="warn") == []


async def test_a_message_may_contain_line_breaks(logs: BuildLogs) -> None:
    logs.append("b1", "first\nsecond")
    assert await messages(logs) == ["first\nsecond"]


async def test_a_full_log_ends_with_the_reason_and_still_takes_errors(tmp_path: Path) -> None:
    logs = BuildLogs(tmp_path, ManualClock(), max_lines=3)
    for number in range(9):
        logs.append("b1", f"line {number}")
    logs.append("b1", "failed", level="error")
    kept = await messages(logs)
    assert kept[:3] == ["line 0", "line 1", "line 2"]
    assert kept[3].startswith("The log is full (3 lines")
    assert kept[4:] == ["failed"]


async def test_errors_cannot_fill_the_disk_either(tmp_path: Path) -> None:
    logs = BuildLogs(tmp_path, ManualClock(), max_bytes=1000)
    for _ in range(200):
        logs.append("b1", "x" * 4000, level="error")
        await logs.flush()
    assert (tmp_path / "b1.jsonl").stat().st_size < 400_000


async def test_a_long_message_is_cut_off(logs: BuildLogs) -> None:
    logs.append("b1", "x" * (MAX_MESSAGE + 7))
    assert (await messages(logs))[0].endswith("… (7 characters cut off)")


async def test_another_process_continues_a_log_and_removes_half_a_line(tmp_path: Path) -> None:
    first = BuildLogs(tmp_path, ManualClock(), max_lines=2)
    first.append("b1", "one")
    await first.flush()
    with (tmp_path / "b1.jsonl").open("ab") as file:
        file.write(b'{"timest')
    second = BuildLogs(tmp_path, ManualClock(), max_lines=2)
    assert await messages(second) == ["one"]
    for text in ("two", "three", "four"):
        second.append("b1", text)
    assert (await messages(second))[:2] == ["one", "two"]
    assert len(await messages(second)) == 3


async def test_only_the_owner_can_read_a_log(logs: BuildLogs, tmp_path: Path) -> None:
    logs.append("b1", "text")
    await logs.flush()
    file = tmp_path / "logs" / "b1.jsonl"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


async def test_removed_logs_are_gone(logs: BuildLogs) -> None:
    logs.append("b1", "text")
    await logs.flush()
    assert await logs.uids() == {"b1"}
    logs.append("b1", "more")
    await logs.remove("b1")
    await logs.remove("b1")
    assert await logs.uids() == frozenset()
    assert await messages(logs) == []


@pytest.mark.parametrize("uid", ["", "../x", "a/b", "a.b"])
async def test_a_name_that_is_no_uid_is_refused(logs: BuildLogs, uid: str) -> None:
    with pytest.raises(ValueError, match="is not the UID of a build"):
        logs.append(uid, "text")


@given(
    st.integers(0, 300), st.integers(0, 320), st.integers(0, 120), st.booleans(), st.integers(0, 40)
)
def test_every_page_is_that_part_of_the_log(
    count: int, offset: int, limit: int, is_restarted: bool, size: int
) -> None:
    async def check(directory: Path) -> None:
        logs = BuildLogs(directory, ManualClock())
        for number in range(count):
            logs.append("b1", f"line {number}" + "ü\n\r" * size)
        if is_restarted:
            await logs.flush()
            logs = BuildLogs(directory, ManualClock())
        page = await logs.read("b1", offset=offset, limit=limit)
        expected = [f"line {number}" for number in range(count)][offset : offset + limit]
        assert [item.message.split("ü")[0] for item in page] == expected
        logs.append("b1", "after")
        assert await messages(logs, offset=count) == ["after"]

    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(check(Path(directory)))


async def test_polling_the_end_of_a_log_opens_no_file(
    logs: BuildLogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(1000):
        logs.append("b1", f"line {number}")
    await logs.flush()
    monkeypatch.setattr(Path, "open", lambda *_: pytest.fail("the file was opened"))
    assert await messages(logs, offset=1000) == []
    assert await messages(logs, offset=5000) == []


async def test_a_full_disk_leaves_whole_lines_and_does_not_fail_the_build(
    logs: BuildLogs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    logs.append("b1", "before")
    await logs.flush()
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:9]))
        logs.append("b1", "cut off")
        await logs.flush()
    with monkeypatch.context() as full:
        full.setattr(os, "write", no_space)
        logs.append("b1", "lost")
        await logs.flush()
    logs.append("b1", "after")
    assert await messages(logs) == ["before", "after"]
    assert await messages(BuildLogs(tmp_path / "logs", ManualClock())) == ["before", "after"]


def no_space(_descriptor: int, _data: bytes) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


async def test_nothing_is_written_into_the_reserve_of_the_disk(tmp_path: Path) -> None:
    is_full = False

    def ensure_room(doing: str, needed: int) -> None:
        if is_full:
            raise DiskFullError(f"cannot {doing}: {needed} bytes")

    logs = BuildLogs(tmp_path / "logs", ManualClock(), ensure_room=ensure_room)
    logs.append("b1", "before")
    await logs.flush()
    is_full = True
    logs.append("b1", "lost", level="error")
    await logs.flush()
    is_full = False
    logs.append("b1", "after")
    assert await messages(logs) == ["before", "after"]
    assert await logs.sizes() == {"b1": (tmp_path / "logs" / "b1.jsonl").stat().st_size}


async def test_a_line_that_cannot_be_read_does_not_hide_the_others(
    logs: BuildLogs, tmp_path: Path
) -> None:
    logs.append("b1", "before")
    await logs.flush()
    with (tmp_path / "logs" / "b1.jsonl").open("ab") as file:
        file.write(b'{"timestamp":\n\xff\n')
    again = BuildLogs(tmp_path / "logs", ManualClock())
    again.append("b1", "after")
    unreadable = "(this line cannot be read)"
    assert await messages(again) == ["before", unreadable, unreadable, "after"]
    assert await messages(again, offset=3) == ["after"]


async def test_many_entries_are_written_with_one_call_and_seen_by_readers_at_once(
    logs: BuildLogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    write = log_files._write

    def counted(path: Path, position: int, data: bytes) -> None:
        calls.append(data.count(b"\n"))
        write(path, position, data)

    monkeypatch.setattr(log_files, "_write", counted)
    for number in range(1000):
        logs.append("b1", f"line {number}")
    assert await messages(logs, offset=999) == ["line 999"]
    assert sum(calls) == 1000
    assert len(calls) == 2  # the first entry at once, then all that came in meanwhile


async def test_an_endless_build_keeps_no_more_in_memory_than_its_log_holds(tmp_path: Path) -> None:
    logs = BuildLogs(tmp_path, ManualClock(), max_lines=50)
    for _ in range(100_000):
        logs.append("b1", "y")
    assert sum(map(len, logs._pending.values())) <= 51
    assert (await messages(logs))[-1].startswith("The log is full (50 lines")
    logs.append("b1", "y")
    assert not logs._pending


async def test_a_page_begins_at_a_time_in_either_direction(tmp_path: Path) -> None:
    clock = ManualClock()
    logs = BuildLogs(tmp_path, clock)
    times = []
    for number in range(200):
        times.append(clock.now())
        logs.append("b1", f"line {number}", level="warn" if number % 2 else "info")
        clock.advance(0.001)

    async def page(number: int | None, *, backward: bool, level: str = "debug") -> list[str]:
        cursor = None if number is None else times[number]
        found = await logs.page("b1", cursor=cursor, limit=2, level=level, backward=backward)
        return [entry.message for entry in found]

    assert await page(None, backward=False) == ["line 0", "line 1"]
    assert await page(None, backward=True) == ["line 199", "line 198"]
    assert await page(100, backward=False) == ["line 100", "line 101"]
    assert await page(100, backward=True) == ["line 99", "line 98"]
    assert await page(100, backward=False, level="warn") == ["line 101", "line 103"]
