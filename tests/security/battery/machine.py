"""What an attack costs the machine in kernel memory beyond what the sandbox is charged for."""

import asyncio
import time
from pathlib import Path

from msgspec import Struct

from paddock.runtime.local.kernel import uncharged
from paddock.runtime.local.kernel.cgroups import Cgroups

PERIOD_SECONDS = 0.05
_SETTLE_SECONDS = 1.0
_LAST_SAMPLES = 10
"""The result is the least of so many: the noise of other programs only adds."""
_KERNEL = ("SUnreclaim", "KernelStack", "PageTables", "VmallocUsed", "Percpu")
"""Page cache and memory of processes are left out: other programs change them all the time."""


class Cost(Struct, frozen=True):
    """Kernel memory that was charged to nobody, in bytes."""

    peak: int
    """While the sandbox existed: what it was charged for is freed a moment after its end."""
    at_end: int


class KernelMemoryMeter:
    """Measures the kernel memory of the machine against what one sandbox is charged for."""

    def __init__(self, cgroups: Cgroups, group: str, init: int) -> None:
        self._cgroups = cgroups
        self._group = group
        self._init = init
        self._before = min(kernel_bytes() - (self._charged() or 0) for _ in range(5))

    async def watch(self, seconds: float) -> Cost:
        """Sample for so many seconds, or until a second after the end of the sandbox."""
        until = time.monotonic() + seconds
        ended: float | None = None
        samples: list[int] = []
        peak = 0
        while time.monotonic() < until:
            used, charged = kernel_bytes() + unsent_bytes(self._init), self._charged()
            samples.append(used - (charged or 0) - self._before)
            if charged is not None:
                peak = max(peak, samples[-1])
            elif ended is None:
                ended = time.monotonic()
                until = min(until, ended + _SETTLE_SECONDS)
            await asyncio.sleep(PERIOD_SECONDS)
        return Cost(peak=peak, at_end=min(samples[-_LAST_SAMPLES:]))

    async def of_others(self) -> int:
        """Return what the kernel uses more than before; call it when the sandbox is gone."""
        used = kernel_bytes()
        for _ in range(int(_SETTLE_SECONDS / PERIOD_SECONDS)):
            await asyncio.sleep(PERIOD_SECONDS)
            used = min(used, kernel_bytes())
        return max(used - self._before, 0)

    def _charged(self) -> int | None:
        """Return the kernel memory that the sandbox is charged for; `None` once it is gone."""
        v1 = self._cgroups.directories(self._group).get("cgroup_memory")
        try:
            if not self._cgroups.is_populated(self._group):
                return None
            if v1 is not None:
                files = ("memory.kmem.usage_in_bytes", "memory.kmem.tcp.usage_in_bytes")
                return sum(int(Path(v1, name).read_text()) for name in files)
            fields = Path(self._cgroups.unified(self._group), "memory.stat").read_text().split()
            found = dict(zip(fields[::2], fields[1::2], strict=True))
            return int(found["kernel"]) + int(found["sock"])
        except OSError:
            return None


def kernel_bytes() -> int:
    """Return the memory that the kernel of this machine uses for itself."""
    memory = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    own = sum(int(memory[name].split()[0]) for name in _KERNEL)
    sockets = 0
    for line in Path("/proc/net/sockstat").read_text().splitlines():
        words = line.split()
        sockets += int(words[words.index("mem") + 1]) if "mem" in words else 0
    return (own << 10) + sockets * 4096


def unsent_bytes(init: int) -> int:
    """Return the unsent data of UDP sockets in the network of a sandbox: pages without a count."""
    try:
        tables = [Path(f"/proc/{init}/net/{name}").read_text() for name in ("udp", "udp6")]
    except OSError:
        return 0  # it was killed
    return sum(map(uncharged.udp_bytes, tables))
