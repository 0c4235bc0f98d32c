"""What a start command says, as its sidecar keeps it."""

import asyncio
import os
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from paddock.kit.clock import ManualClock
from paddock.runtime.kubernetes.sidecar.start_log import MAX_BYTES, MAX_LINES, Follower, Lines


def lines() -> Lines:
    return Lines(ManualClock(datetime(2030, 1, 1, tzinfo=UTC)))


async def said(script: str, kept: Lines | None = None) -> list[tuple[str, str, dict[str, str]]]:
    kept = kept or lines()
    process = subprocess.Popen(
        ["/bin/sh", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    follower = Follower(process, kept)
    async with asyncio.timeout(30):
        await follower.finished()
    await asyncio.to_thread(process.wait)
    return [
        (line.level, line.message, dict(line.fields)) for line in kept.read(since=None, limit=9)
    ]


async def test_lines_of_both_streams_are_kept_and_its_end_too():
    found = await said("echo hello; echo oops >&2; printf 'no newline'; exit 3")
    assert ("info", "hello", {"stream": "stdout"}) in found
    assert ("error", "oops", {"stream": "stderr"}) in found
    assert ("info", "no newline", {"stream": "stdout"}) in found
    assert ("info", "start command ended", {"exit_code": "3"}) in found


async def test_a_child_that_outlives_the_command_is_listened_to(tmp_path: Path):
    gate, kept = tmp_path / "gate", lines()
    os.mkfifo(gate)

    async def let_go() -> None:
        """When its end was noticed, and not before."""
        while len(kept.read(since=None, limit=9)) < 2:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(gate.write_text, "go")

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(let_go())
        found = await said(f"(cat {gate} >/dev/null; echo late) & echo early", kept)
    assert [message for _, message, _ in found] == ["early", "start command ended", "late"]


async def test_a_kernel_without_process_descriptors_will_do(monkeypatch: pytest.MonkeyPatch):
    def unknown(_pid: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", unknown)
    found = await said("echo hello")
    assert [message for _, message, _ in found] == ["hello", "start command ended"]


def test_the_oldest_lines_go_where_there_are_too_many():
    kept = lines()
    for number in range(MAX_LINES + 5):
        kept.add(str(number))
    assert [line.message for line in kept.read(since=None, limit=2)] == ["10003", "10004"]
    assert len(kept.read(since=None, limit=MAX_LINES * 2)) == MAX_LINES
    for _ in range(200):
        kept.add("x" * 100_000)
    total = sum(len(line.message) for line in kept.read(since=None, limit=MAX_LINES))
    assert total <= MAX_BYTES


def test_only_what_is_new_is_given():
    kept = lines()
    kept.add("then")
    now = datetime(2030, 1, 1, tzinfo=UTC)
    assert kept.read(since=now, limit=5)
    assert not kept.read(since=now + timedelta(seconds=1), limit=5)
    assert not kept.read(since=None, limit=0)
