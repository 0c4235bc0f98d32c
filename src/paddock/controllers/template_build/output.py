"""Output of commands as lines of the log of a build, and how fast it is read."""

import asyncio
from collections.abc import Callable

MAX_LINE_BYTES = 8 << 10
BURST_BYTES = 8 << 20
"""Output of a command that is read at any speed."""
BYTES_PER_SECOND = 2 << 20
"""How fast the rest is read. The command waits to write, as its pipe is full."""


class OutputLines:
    """Splits output into lines: `[prefix] [stdout]: line`. A line that never ends is cut."""

    def __init__(self, prefix: str, write: Callable[[str], None]) -> None:
        self._prefix = prefix
        self._write = write
        self._partial: dict[str, bytes] = {}

    def feed(self, stream: str, data: bytes) -> None:
        """Write the complete lines of a piece of output."""
        *lines, rest = (self._partial.get(stream, b"") + data).split(b"\n")
        for line in lines:
            self._line(stream, line)
        while len(rest) > MAX_LINE_BYTES:
            self._line(stream, rest[:MAX_LINE_BYTES])
            rest = rest[MAX_LINE_BYTES:]
        self._partial[stream] = rest

    def end(self) -> None:
        """Write what has no line end."""
        for stream, rest in self._partial.items():
            if rest:
                self._line(stream, rest)
        self._partial.clear()

    def _line(self, stream: str, line: bytes) -> None:
        text = line.rstrip(b"\r").decode("utf-8", "replace")
        self._write(f"[{self._prefix}] [{stream}]: {text}")


class OutputPace:
    """Bounds how fast the output of one command is read, and says so once it does."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._until = float("-inf")
        """The time at which all that was read may have been read."""
        self._is_slow = False

    async def take(self, size: int) -> None:
        """Wait until so many bytes may have been read."""
        now = asyncio.get_running_loop().time()
        earliest = now - BURST_BYTES / BYTES_PER_SECOND
        self._until = max(self._until, earliest) + size / BYTES_PER_SECOND
        if self._until <= now:
            return
        if not self._is_slow:
            self._is_slow = True
            self._warn(
                f"The command prints more than {BYTES_PER_SECOND >> 20} MiB per second: its output "
                "is read no faster, and it waits. Redirect what nobody reads to a file."
            )
        await asyncio.sleep(self._until - now)
