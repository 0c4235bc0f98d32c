"""Splits a stream into lines with bounded memory."""

from collections.abc import Iterator


class BoundedLines:
    """Returns complete lines; of a line that is too long, only its length.

    At most `max_bytes` of an incomplete line are kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._parts: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> Iterator[bytes | int]:
        """Yield the lines that these bytes complete, without their ends."""
        start = 0
        while (end := data.find(b"\n", start)) >= 0:
            self._keep(data[start:end])
            if self._size > self._max_bytes:
                yield self._size
            elif self._size:
                yield b"".join(self._parts)
            self._parts, self._size = [], 0
            start = end + 1
        self._keep(data[start:])

    def _keep(self, data: bytes) -> None:
        if not data:
            return
        self._size += len(data)
        if self._size > self._max_bytes:
            self._parts = []
        else:
            self._parts.append(data)
