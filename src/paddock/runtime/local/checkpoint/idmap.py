"""User namespaces that only carry a map of ids, for mounts that wear it.

A root must be mounted with the ids of a sandbox before CRIU makes the sandbox's own user
namespace, so a stand-in with the same map is used. A descriptor keeps it; no process does.
"""

import os
import signal
import threading

from paddock.runtime.local.kernel import syscalls

_LONG_ENOUGH_SECONDS = 30


class IdNamespaces:
    """Stand-ins by first id, each made once."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int], int] = {}
        self._lock = threading.Lock()

    def get(self, base: int, count: int) -> int:
        """Give a descriptor that stays ours: do not close it."""
        with self._lock:
            if (base, count) not in self._made:
                self._made[base, count] = _make(base, count)
            return self._made[base, count]

    def close(self) -> None:
        """Let all of them go."""
        with self._lock:
            for fd in self._made.values():
                os.close(fd)
            self._made.clear()


def _make(base: int, count: int) -> int:
    pid = syscalls.sleeper(syscalls.CLONE_NEWUSER, seconds=_LONG_ENOUGH_SECONDS)
    try:
        for name in ("uid_map", "gid_map"):
            with open(f"/proc/{pid}/{name}", "w") as file:
                file.write(f"0 {base} {count}\n")
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
