"""OOM kills of a sandbox: how many there were, and the memory that was used up.

Read from the memory cgroup of the sandbox, version 1 or 2, through a descriptor of its directory.
envd reads it to explain how a command ended, the node to report it.
"""

import os
from collections.abc import Mapping

from msgspec import Struct

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_NO_LIMIT_V1 = 1 << 62
"""Version 1 shows a limit above this if there is none."""
_FULL = 0.98
"""The share of its limit that a sandbox has used when it is full: version 1 counts in batches."""


class MemoryKills(Struct, frozen=True):
    """The OOM kills of one cgroup."""

    directory: int
    is_v2: bool
    limit_above: int = 0
    """The sandbox's limit if its cgroup has none, because one above it has: that of a pod."""

    def count(self) -> int:
        """Return how many processes were killed since the cgroup was created."""
        return self._events().get("oom_kill", 0)

    def cause(self) -> str:
        """Return why processes were killed: the sandbox's limit, or the memory of the machine."""
        if self.is_v2:
            limit = _number(self._read("memory.max"))
            is_full = self._events().get("oom", 0) > 0
        else:
            limit = _number(self._read("memory.limit_in_bytes"))
            limit = 0 if limit > _NO_LIMIT_V1 else limit
            is_full = _number(self._read("memory.max_usage_in_bytes")) >= limit * _FULL
        if not limit and self.limit_above:
            limit, is_full = self.limit_above, True
        if limit and is_full:
            return f"the sandbox used its {size(limit)} of memory"
        return "the machine ran out of memory"

    def _events(self) -> dict[str, int]:
        text = self._read("memory.events" if self.is_v2 else "memory.oom_control")
        rows = (line.split() for line in text.split("\n"))
        return {row[0]: _number(row[1]) for row in rows if len(row) == 2}

    def _read(self, name: str) -> str:
        try:
            fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self.directory)
        except OSError:  # the cgroup was removed
            return ""
        try:
            return os.read(fd, 4096).decode("ascii", "replace")
        except OSError:
            return ""
        finally:
            os.close(fd)


def from_usage_files(
    usage_files: Mapping[str, int] | None, limit: int | None = None
) -> MemoryKills | None:
    """Return the counter of a sandbox with this limit, or None if its cgroup is not known."""
    usage_files = usage_files or {}
    if (fd := usage_files.get("cgroup")) is not None:
        return MemoryKills(fd, True, limit or 0)
    fd = usage_files.get("cgroup_memory")
    return None if fd is None else MemoryKills(fd, False, limit or 0)


def size(count: int) -> str:
    """Format a number of bytes: `1 GiB`, `1.5 GiB`, `300 MiB`."""
    for unit, name in _UNITS:
        if count >= unit:
            return f"{round(count / unit, 1):g} {name}"
    return f"{count} bytes"


def _number(text: str) -> int:
    text = text.strip()
    return int(text) if text.isdigit() else 0
