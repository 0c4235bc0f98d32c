"""The output of a sandbox's start command: the latest lines, kept by the sidecar.

The lines are in the sidecar's memory and are lost when the pod ends or the sidecar restarts. They
are also written to the sidecar's standard error, for the cluster's log collectors.
"""

import asyncio
import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from datetime import datetime
from typing import IO

from paddock.kit.clock import Clock
from paddock.runtime.port import LogLine

MAX_LINES = 10_000
MAX_BYTES = 1 << 20
"""Limit for all lines together."""
_MAX_LINE = 8192
_READ = 65536


class LogBuffer:
    """A bounded buffer of log lines."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lines: deque[LogLine] = deque()
        self._bytes = 0

    def add(self, message: str, *, level: str = "info", **fields: str) -> None:
        """Append a line; drop the oldest ones above the limits."""
        line = LogLine(
            at=self._clock.now(), level=level, message=message[:_MAX_LINE], fields=fields
        )
        self._lines.append(line)
        self._bytes += len(line.message)
        while len(self._lines) > MAX_LINES or self._bytes > MAX_BYTES:
            self._bytes -= len(self._lines.popleft().message)

    def read(self, *, since: datetime | None, limit: int) -> tuple[LogLine, ...]:
        """Return the last `limit` lines, oldest first."""
        wanted = [line for line in self._lines if since is None or line.at >= since]
        return tuple(wanted[-limit:]) if limit > 0 else ()


class OutputReader:
    """Reads the output of a process into a log buffer and records its exit code."""

    def __init__(self, process: subprocess.Popen[bytes], lines: LogBuffer) -> None:
        self._process = process
        self._lines = lines
        self._loop = asyncio.get_running_loop()
        self._open = 1
        self._finished = asyncio.Event()
        for stream, name in ((process.stdout, "stdout"), (process.stderr, "stderr")):
            if stream is not None:
                self._follow(stream, name)
        try:
            self._pidfd = os.pidfd_open(process.pid)
        except OSError:
            # Not every kernel has pidfds; then the end of the streams counts.
            self._pidfd = None
            self._close_one()
        else:
            self._loop.add_reader(self._pidfd, self._ended)

    async def finished(self) -> None:
        """Wait until the process has ended and its output streams are closed."""
        await self._finished.wait()

    def _close_one(self) -> None:
        self._open -= 1
        if not self._open:
            self._finished.set()
            if self._pidfd is None:
                self._lines.add("start command ended")

    def _follow(self, stream: IO[bytes], name: str) -> None:
        os.set_blocking(stream.fileno(), False)
        self._open += 1
        partial = bytearray()
        self._loop.add_reader(stream.fileno(), self._reader(stream, name, partial))

    def _reader(self, stream: IO[bytes], name: str, partial: bytearray) -> Callable[[], None]:
        def read() -> None:
            try:
                data = os.read(stream.fileno(), _READ)
            except BlockingIOError:
                return
            sys.stderr.buffer.write(data)
            sys.stderr.buffer.flush()
            partial.extend(data)
            *lines, rest = bytes(partial).split(b"\n")
            partial[:] = rest
            if partial and (not data or len(partial) > _MAX_LINE):
                lines.append(bytes(partial))
                partial.clear()
            level = "error" if name == "stderr" else "info"
            for line in lines:
                text = line.decode(errors="replace").rstrip("\r")
                self._lines.add(text, level=level, stream=name)
            if not data:
                self._loop.remove_reader(stream.fileno())
                stream.close()
                self._close_one()

        return read

    def _ended(self) -> None:
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
        self._lines.add("start command ended", exit_code=str(self._process.wait()))
        self._close_one()
