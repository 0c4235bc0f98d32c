"""The log of the start command in the sidecar."""

import asyncio
import os
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from paddock.kit.clock import ManualClock
from paddock.runtime.kubernetes.sidecar.start_log import (
    MAX_BYTES,
    MAX_LINES,
    LogBuffer,
    OutputReader,
)


def buffer() -> LogBuffer:
    return LogBuffer(ManualClock(datetime(2030, 1, 1, tzinfo=UTC)))


async def run(script: str, kept: LogBuffer | None = None) -> list[tuple[str, str, dict[str, str]]]:
    kept = kept or buffer()
    process = subprocess.Popen(
        ["/bin/sh", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    reader = OutputReader(process, kept)
    async with asyncio.timeout(30):
        await reader.finished()
    await asyncio.to_thread(process.wait)
    return [
        (line.level, line.message, dict(line.fields)) for line in kept.read(since=None, limit=9)
    ]


async def test_both_streams_and_the_exit_code_are_logged():
    found = await run("echo hello; echo oops >&2; printf 'no newline'; exit 3")
    assert ("info", "hello", {"stream": "stdout"}) in found
    assert ("error", "oops", {"stream": "stderr"}) in found
    assert ("info", "no newline", {"stream": "stdout"}) in found
    assert ("info", "start command ended", {"exit_code": "3"}) in found


async def test_output_of_a_child_that_outlives_the_command_is_logged(tmp_path: Path):
    gate, kept = tmp_path / "gate", buffer()
    os.mkfifo(gate)

    async def open_gate() -> None:
        """Open the gate after the end of the command was logged."""
        while len(kept.read(since=None, limit=9)) < 2:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(gate.write_text, "go")

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(open_gate())
        found = await run(f"(cat {gate} >/dev/null; echo late) & echo early", kept)
    assert [message for _, message, _ in found] == ["early", "start command ended", "late"]


async def test_a_kernel_without_pidfds_works(monkeypatch: pytest.MonkeyPatch):
    def unknown(_pid: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", unknown)
    found = await run("echo hello")
    assert [message for _, message, _ in found] == ["hello", "start command ended"]


def test_the_oldest_lines_are_dropped():
    kept = buffer()
    for number in range(MAX_LINES + 5):
        kept.add(str(number))
    assert [line.message for line in kept.read(since=None, limit=2)] == ["10003", "10004"]
    assert len(kept.read(since=None, limit=MAX_LINES * 2)) == MAX_LINES
    for _ in range(200):
        kept.add("x" * 100_000)
    total = sum(len(line.message) for line in kept.read(since=None, limit=MAX_LINES))
    assert total <= MAX_BYTES


def test_only_lines_since_a_time_are_returned():
    kept = buffer()
    kept.add("then")
    now = datetime(2030, 1, 1, tzinfo=UTC)
    assert kept.read(since=now, limit=5)
    assert not kept.read(since=now + timedelta(seconds=1), limit=5)
    assert not kept.read(since=None, limit=0)
