"""Tells from one small file whether the kernel of the machine uses more memory than before.

A sandbox can take hundreds of MiB of kernel memory per second. To inspect all sandboxes several
times per second would cost too much; reading /proc/meminfo takes 30 µs.
"""

import os
import re
from pathlib import Path

from msgspec import Struct

_COUNTED = ("SUnreclaim", "KernelStack", "PageTables", "VmallocUsed", "Percpu")
_OTHER = ("MemFree", "Buffers", "Cached", "SwapCached", "AnonPages", "SReclaimable")
_NAMES = "|".join(("MemTotal", *_COUNTED, *_OTHER))
_FIELDS = re.compile(rb"^(%s): *(\d+)" % _NAMES.encode(), re.MULTILINE)
_MAX_BYTES = 1 << 14
COUNTED_STEP = 8 << 20
UNCOUNTED_STEP = 64 << 20
"""Pages that no field counts include free ones of the CPUs, so they vary more."""


class KernelMemory(Struct, frozen=True):
    """Memory that the kernel uses, in bytes."""

    counted: int
    """Slabs, stacks, page tables and maps of the kernel."""
    uncounted: int
    """What is in no field of /proc/meminfo, such as pages of unsent data."""


def kernel_memory(meminfo: bytes) -> KernelMemory:
    """Parse /proc/meminfo."""
    fields = {name.decode(): int(value) << 10 for name, value in _FIELDS.findall(meminfo)}
    counted = sum(fields.get(name, 0) for name in _COUNTED)
    others = sum(fields.get(name, 0) for name in _OTHER)
    return KernelMemory(counted, fields["MemTotal"] - others - counted)


class KernelGrowth:
    """Compares the kernel memory of the machine with the least since it last grew."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._meminfo = proc / "meminfo"
        self._base = KernelMemory(0, 0)
        self.has_grown()

    def has_grown(self) -> bool:
        """Whether it has grown by a step since the last call that returned `True`."""
        now, base = kernel_memory(self._read()), self._base
        if now.counted - base.counted >= COUNTED_STEP or (
            now.uncounted - base.uncounted >= UNCOUNTED_STEP
        ):
            self._base = now
            return True
        self._base = KernelMemory(
            min(now.counted, base.counted), min(now.uncounted, base.uncounted)
        )
        return False

    def _read(self) -> bytes:
        fd = os.open(self._meminfo, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(fd, _MAX_BYTES)
        finally:
            os.close(fd)
