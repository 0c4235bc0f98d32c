"""Prepare the network namespace of a process that is being restored.

CRIU creates the namespace empty, and connections of a sandbox to itself can only be restored over a
working loopback. The launcher sets the same for a new sandbox (`launcher.c`, with the reason).
"""

import contextlib
import fcntl
import os
import socket
import struct

from paddock.runtime.local.kernel import syscalls

_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_COPIES = "/proc/sys/net/core/tstamp_allow_data"
_REQUEST = struct.Struct("16sh14x")


def bring_up_loopback(pid: int) -> None:
    """Bring up `lo` in the namespace of `pid`; the calling thread enters it and returns."""
    flags = os.O_RDONLY | os.O_CLOEXEC
    caller = os.open("/proc/thread-self/ns/net", flags)
    try:
        there = os.open(f"/proc/{pid}/ns/net", flags)
        try:
            syscalls.setns(there, syscalls.CLONE_NEWNET)
        finally:
            os.close(there)
        try:
            with contextlib.suppress(FileNotFoundError), open(_COPIES, "w") as setting:
                setting.write("0")  # of the namespace of this thread
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                response = fcntl.ioctl(probe, _SIOCGIFFLAGS, _REQUEST.pack(b"lo", 0))
                _, current = _REQUEST.unpack(response)
                fcntl.ioctl(probe, _SIOCSIFFLAGS, _REQUEST.pack(b"lo", current | _IFF_UP))
        finally:
            syscalls.setns(caller, syscalls.CLONE_NEWNET)
    finally:
        os.close(caller)
