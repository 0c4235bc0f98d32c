"""The cgroup that accounts for the usage of a sandbox in a pod: the sidecar's own.

Commands are children of the sidecar; the main container only sleeps. With a cgroup namespace the
sidecar's cgroup is the root of the mount, without one its path leads there. The directories are
opened before the sidecar enters the main container, where they are not visible.
"""

import os
from pathlib import Path

_KINDS = {"memory": "cgroup_memory", "cpuacct": "cgroup_cpu"}
"""Version 1: controllers and the meter's names for them."""


def own_cgroups(
    *, root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> dict[str, int]:
    """Open the cgroup directories that the meter reads; empty if there are none."""
    found: dict[str, int] = {}
    for line in own.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            place = _place(root, path)
            # The root cgroup has no counters, and hybrid hierarchies count in version 1.
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
