"""Resource usage of a sandbox for `GET /metrics`: from usage files if any, else from /proc.

Usage files are descriptors opened outside the sandbox, so their values come from the kernel: the
directories of its cgroup, and the byte count of its disk quota. Percentages are relative to the
allowed CPUs, since the last call.
"""

import os
import time
from collections.abc import Mapping

from msgspec import UNSET, Struct, UnsetType

from paddock.envd.config import Config

_MIB = 1 << 20


class Metrics(Struct, frozen=True, kw_only=True):
    """The body of `GET /metrics`."""

    ts: int
    cpu_count: int
    cpu_used_pct: float
    mem_total: int
    mem_used: int
    mem_cache: int
    mem_total_mib: int
    mem_used_mib: int
    disk_used: int | UnsetType = UNSET
    """Unset if the sandbox shares a disk that does not count its bytes."""
    disk_total: int


class Meter:
    """Reads usage; keeps the last reading for percentages."""

    def __init__(self, config: Config, usage_files: Mapping[str, int] | None = None) -> None:
        self._config = config
        self._usage_files = usage_files or {}
        """Directories `cgroup` (v2), or `cgroup_memory` and `cgroup_cpu` (v1); the file `disk`."""
        self._last = (time.monotonic(), self._cpu_seconds())

    def read(self) -> Metrics:
        """Return the usage since the last call."""
        then, before = self._last
        self._last = now, used = (time.monotonic(), self._cpu_seconds())
        cpus = self._config.cpu_count or os.cpu_count() or 1
        percent = 100 * (used - before) / max(now - then, 1e-3) / cpus
        total, memory, cache = self._memory()
        disk_total, disk_used = self._disk()
        return Metrics(
            ts=int(time.time()),
            cpu_count=max(1, round(cpus)),
            cpu_used_pct=round(min(max(percent, 0.0), 100.0), 2),
            mem_total=total,
            mem_used=memory,
            mem_cache=cache,
            mem_total_mib=total // _MIB,
            mem_used_mib=memory // _MIB,
            disk_used=disk_used,
            disk_total=disk_total,
        )

    def _cpu_seconds(self) -> float:
        if (fd := self._usage_files.get("cgroup")) is not None:
            return _table(_read_at(fd, "cpu.stat")).get("usage_usec", 0) / 1e6
        if (fd := self._usage_files.get("cgroup_cpu")) is not None:
            return _number(_read_at(fd, "cpuacct.usage")) / 1e9
        fields = _read("/proc/stat").partition("\n")[0].split()[1:]
        ticks = [int(value) for value in fields if value.isdigit()]
        # user nice system idle iowait irq softirq steal
        busy = sum(ticks[:3]) + sum(ticks[5:8])
        return busy / os.sysconf("SC_CLK_TCK")

    def _disk(self) -> tuple[int, int | UnsetType]:
        """Return total and used bytes."""
        facts = os.statvfs("/")
        size, free = facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize
        limit = self._config.disk_total_bytes or size
        if (fd := self._usage_files.get("disk")) is not None:
            return limit, _number(_pread(fd)) + self._config.disk_inherited_bytes
        # With a limit below the size of the file system, its usage includes other sandboxes.
        return limit, (size - free if size <= limit else UNSET)

    def _memory(self) -> tuple[int, int, int]:
        """Return total bytes, used bytes without cache, and cache bytes."""
        host = _table(_read("/proc/meminfo").replace(":", ""))
        machine = host.get("MemTotal", 0) * 1024
        limit = self._config.memory_total_bytes
        if (fd := self._usage_files.get("cgroup")) is not None:
            limit = limit or _number(_read_at(fd, "memory.max"))
            used = _number(_read_at(fd, "memory.current"))
            cache = _table(_read_at(fd, "memory.stat")).get("file", 0)
        elif (fd := self._usage_files.get("cgroup_memory")) is not None:
            limit = limit or _number(_read_at(fd, "memory.limit_in_bytes"))
            used = _number(_read_at(fd, "memory.usage_in_bytes"))
            cache = _table(_read_at(fd, "memory.stat")).get("total_cache", 0)
        else:
            cache = host.get("Cached", 0) * 1024
            used = machine - host.get("MemFree", 0) * 1024 - host.get("Buffers", 0) * 1024
        total = min(limit, machine) if limit and machine else limit or machine
        return total, max(used - cache, 0), cache


def _read(path: str) -> str:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""
    return _take(fd)


def _read_at(directory: int, name: str) -> str:
    try:
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)
    except OSError:
        return ""
    return _take(fd)


def _pread(fd: int) -> str:
    try:
        return os.pread(fd, 64, 0).decode("ascii", "replace")
    except OSError:
        return ""


def _take(fd: int) -> str:
    try:
        return os.read(fd, 64 << 10).decode("ascii", "replace")
    except OSError:
        return ""
    finally:
        os.close(fd)


def _number(text: str) -> int:
    text = text.strip()
    return int(text) if text.isdigit() else 0


def _table(text: str) -> dict[str, int]:
    rows = (line.split() for line in text.split("\n"))
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdigit()}
