"""Where the kernel counts what a sandbox in a pod uses: the sidecar's own cgroup.

Commands are the sidecar's children, and the main container only holds still. A container sees its
cgroup as the root of what is mounted; where it has no view of its own, its path leads there. The
directories are opened before going inside, where they are not to be found.
"""

import os
from pathlib import Path

_KINDS = {"memory": "cgroup_memory", "cpuacct": "cgroup_cpu"}
"""Version 1: what counts, and what the meter calls it."""


def own_cgroups(
    *, root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> dict[str, int]:
    """Open the directories that the meter reads; empty where there are none."""
    found: dict[str, int] = {}
    for line in own.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            place = _place(root, path)
            # At the top of a machine nothing is counted, and hybrids count elsewhere.
            if (place / "memory.current").exists() and (place / "cpu.stat").exists():
                return {"cgroup": _open(place)}
            continue
        for kind in controllers.split(","):
            mounts = (root / kind, root / controllers)
            if kind in _KINDS and (mount := next((m for m in mounts if m.is_dir()), None)):
                found[_KINDS[kind]] = _open(_place(mount, path))
    return found


def _place(mount: Path, path: str) -> Path:
    place = mount / path.lstrip("/")
    return place if place.is_dir() else mount


def _open(place: Path) -> int:
    return os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
