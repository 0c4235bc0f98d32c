"""Log lines of one sandbox: a file of bounded size, and what is read from it."""

import contextlib
import os
from datetime import datetime
from pathlib import Path

import msgspec

from paddock.kit.clock import Clock
from paddock.runtime.port import LogLine

# Made at import, not by the first use: see docs/decisions/0080.
_decoder = msgspec.json.Decoder(LogLine)
_HALF_BYTES = 512 * 1024
_MAX_LINE = 8192


class Journal:
    """Two files that take turns: when one is full, the older one goes."""

    def __init__(self, directory: Path, clock: Clock) -> None:
        self._current = directory / "log.jsonl"
        self._older = directory / "log.1.jsonl"
        self._clock = clock

    def write(self, message: str, *, level: str = "info", **facts: str) -> None:
        """Append a line. A directory that is gone means the sandbox is, too."""
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
        """Give the last lines, oldest first."""
        lines: list[LogLine] = []
        for path in (self._older, self._current):
            with contextlib.suppress(FileNotFoundError):
                for raw in path.read_bytes().splitlines():
                    # A line that was being written when the node was killed is cut off.
                    with contextlib.suppress(msgspec.DecodeError):
                        lines.append(_decoder.decode(raw))
        wanted = [line for line in lines if since is None or line.at >= since]
        return tuple(wanted[-limit:]) if limit > 0 else ()
