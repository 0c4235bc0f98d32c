"""The log of one sandbox, in files of bounded size."""

import contextlib
import os
from datetime import datetime
from pathlib import Path

import msgspec

from paddock.kit.clock import Clock
from paddock.runtime.port import LogLine

# Created at import, not at first use: see docs/decisions/0080.
_decoder = msgspec.json.Decoder(LogLine)
_HALF_BYTES = 512 * 1024
_MAX_LINE = 8192


class LogFile:
    """Two files: when the current one is full, it replaces the older one."""

    def __init__(self, directory: Path, clock: Clock) -> None:
        self._current = directory / "log.jsonl"
        self._older = directory / "log.1.jsonl"
        self._clock = clock

    def write(self, message: str, *, level: str = "info", **facts: str) -> None:
        """Append a line; do nothing if the sandbox's directory is gone."""
        line = LogLine(at=self._clock.now(), level=level, message=message[:_MAX_LINE], fields=facts)
        data = msgspec.json.encode(line) + b"\n"
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(
                self._current, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600
            )
            try:
                os.write(fd, data)
                if os.fstat(fd).st_size > _HALF_BYTES:
                    os.replace(self._current, self._older)
            finally:
                os.close(fd)

    def read(self, *, since: datetime | None, limit: int) -> tuple[LogLine, ...]:
        """Return the last `limit` lines, oldest first."""
        lines: list[LogLine] = []
        for path in (self._older, self._current):
            with contextlib.suppress(FileNotFoundError):
                for raw in path.read_bytes().splitlines():
                    # A line may be incomplete if the node was killed while writing it.
                    with contextlib.suppress(msgspec.DecodeError):
                        lines.append(_decoder.decode(raw))
        wanted = [line for line in lines if since is None or line.at >= since]
        return tuple(wanted[-limit:]) if limit > 0 else ()
