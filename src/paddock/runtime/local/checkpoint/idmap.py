"""User namespaces that only carry an id map, for idmapped mounts.

A root must be mounted with the ids of a sandbox before CRIU creates the sandbox's own user
namespace, so a namespace with the same map is used. A descriptor keeps it alive, not a process.
"""

import os
import signal
import threading

from paddock.runtime.local.kernel import syscalls

_HOLDER_SECONDS = 30


class IdNamespaces:
    """User namespaces by id range, each created once."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int], int] = {}
        self._lock = threading.Lock()

    def get(self, base: int, count: int) -> int:
        """Return a descriptor; the caller must not close it."""
        with self._lock:
            if (base, count) not in self._made:
                self._made[base, count] = _make(base, count)
            return self._made[base, count]

    def close(self) -> None:
        with self._lock:
            for fd in self._made.values():
                os.close(fd)
            self._made.clear()


def _make(base: int, count: int) -> int:
    pid = syscalls.sleeper(syscalls.CLONE_NEWUSER, seconds=_HOLDER_SECONDS)
    try:
        for name in ("uid_map", "gid_map"):
            with open(f"/proc/{pid}/{name}", "w") as file:
                file.write(f"0 {base} {count}\n")
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
