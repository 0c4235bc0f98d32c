"""The output of a command or of code, of which the end is kept."""

LIMIT_BYTES = 32 * 1024
"""How much of each stream a tool returns: models read all of it."""


_NOTE_BYTES = 64
"""The length of a note about what is left out, at most."""


def end_of(text: str) -> str:
    """Return a text, or its end with a note if it is too long. Idempotent."""
    data = text.encode()
    if len(data) <= LIMIT_BYTES + _NOTE_BYTES:
        return text
    tail = OutputTail()
    tail.add(data)
    return tail.text


class OutputTail:
    """Keeps the last bytes of a stream, and counts the others."""

    def __init__(self, limit: int = LIMIT_BYTES) -> None:
        self._limit = limit
        self._kept = bytearray()
        self.received = 0
        """All bytes of the stream."""

    def add(self, data: bytes) -> None:
        """Append to the stream."""
        self.received += len(data)
        if len(data) >= self._limit:
            self._kept = bytearray(data[len(data) - self._limit :])
            return
        self._kept += data
        if len(self._kept) > 2 * self._limit:
            del self._kept[: len(self._kept) - self._limit]

    @property
    def omitted(self) -> int:
        """The number of bytes before those that are kept."""
        return max(self.received - self._limit, 0)

    @property
    def text(self) -> str:
        """The end of the stream, with a note if there was more before."""
        kept = bytes(self._kept[-self._limit :]).decode(errors="replace")
        if not self.omitted:
            return kept
        return f"[{self.omitted} bytes before this are left out]\n{kept}"
