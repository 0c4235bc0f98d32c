"""Output of commands as lines of the log of a build."""

from collections.abc import Callable

MAX_LINE_BYTES = 8 << 10


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
