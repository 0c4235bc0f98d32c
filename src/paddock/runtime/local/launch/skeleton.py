"""A skeleton: a child of the launcher that waits to become a sandbox's init.

It has namespaces, cgroups and detached file systems, and can wait in the warm stock. On a `Launch`
message it mounts everything, pivots into its root and becomes init (`native/launcher/launcher.c`).
"""

import contextlib
import os
import signal
import socket

from msgspec import Struct


class Skeleton(Struct):
    """A cloned process with namespaces that waits to become a sandbox's init."""

    pid: int
    pidfd: int
    control: socket.socket
    slot: int
    userns: int
    is_ready: bool = False
    """Whether its `ready` message was read. A launch may be sent before that."""

    def kill(self) -> None:
        """Kill the process, skeleton or init, and release it."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        self.release()

    def release(self) -> None:
        """Close all descriptors."""
        self.close()
        os.close(self.pidfd)

    def close(self) -> None:
        """Close what only a skeleton needs; the pidfd stays open."""
        self.control.close()
        if self.userns >= 0:
            os.close(self.userns)
            self.userns = -1
