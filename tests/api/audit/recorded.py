"""A sink that keeps lines in memory, and the events in it."""

import errno
import json
from typing import Any

from paddock.api.audit.log import AuditLog
from paddock.kit.clock import LoopClock


class Lines:
    """Keeps what is written; fails on demand."""

    def __init__(self) -> None:
        self.data = b""
        self.is_full = False

    def write(self, data: bytes) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, "no space left on device")
        self.data += data

    def check(self) -> None: ...

    def close(self) -> None: ...

    def take(self) -> list[dict[str, Any]]:
        """Return the events written since the last call; each is one line."""
        found, self.data = self.data, b""
        assert found.endswith(b"\n") or not found
        return [json.loads(line) for line in found.splitlines()]


def recording(*, is_required: bool = False) -> tuple[Lines, AuditLog]:
    """An audit log on virtual time, and its lines."""
    lines = Lines()
    return lines, AuditLog(lines, LoopClock(), is_required=is_required)
