"""What the machine is busy with: a note for tests that wait for something in vain.

Tests of several workers share the machine. Without this, a timeout does not show whether another
one had used it up.
"""

import contextlib
import os
import shutil
from pathlib import Path

_SHOWN = 8
"""Processes that are listed."""
_TICKS = os.sysconf("SC_CLK_TCK")


def machine_state(disk: Path) -> str:
    """Return load, pressure, memory, free disk and the processes that used most CPU."""
    memory = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    shown = ("MemAvailable", "Dirty", "Writeback", "SUnreclaim")
    lines = [
        f"load {Path('/proc/loadavg').read_text().strip()}",
        *(f"pressure of {name}: {text}" for name, text in _pressure()),
        ", ".join(f"{name} {memory[name].strip()}" for name in shown),
        f"{disk}: {shutil.disk_usage(disk).free >> 20:,} MiB free",
        *_busiest(),
    ]
    return "\n".join(("the machine:", *lines))


def _pressure() -> list[tuple[str, str]]:
    """Return the share of time that work waited, by resource, where the kernel counts it."""
    found: list[tuple[str, str]] = []
    for name in ("cpu", "io", "memory"):
        with contextlib.suppress(OSError):
            found.append((name, Path(f"/proc/pressure/{name}").read_text().splitlines()[0]))
    return found


def _busiest() -> list[str]:
    """Return the processes that have used most CPU, and all that wait in the kernel."""
    found: list[tuple[float, str, str]] = []
    for path in Path("/proc").iterdir():
        if not path.name.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError):
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            seconds = (int(fields[11]) + int(fields[12])) / _TICKS
            found.append((seconds, fields[0], f"{path.name} {command.strip()[:120]}"))
    busiest = sorted(found, reverse=True)[:_SHOWN]
    stuck = [item for item in found if item[1] == "D" and item not in busiest]
    return [
        f"{seconds:.0f} s of CPU, state {state}: {name}" for seconds, state, name in busiest + stuck
    ]
