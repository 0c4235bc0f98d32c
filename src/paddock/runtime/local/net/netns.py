"""Network namespaces by file descriptor: create one, enter one, create sockets in one.

This module has no dependencies, so that gateways can use it. `setns` affects only the calling
thread and takes some microseconds; every function returns to the thread's original namespace.
"""

import contextlib
import ctypes
import os
import socket
import threading
from collections.abc import Generator

CLONE_NEWNET = 0x40000000

_libc = ctypes.CDLL(None, use_errno=True)


def create() -> int:
    """Create an empty network namespace; return a descriptor that keeps it alive."""
    made: list[int] = []
    failed: list[OSError] = []

    def work() -> None:
        # In a separate thread, because unshare cannot be undone.
        if _libc.unshare(CLONE_NEWNET) != 0:
            code = ctypes.get_errno()
            failed.append(OSError(code, f"cannot create a network namespace: {os.strerror(code)}"))
        else:
            made.append(_open("/proc/thread-self/ns/net"))

    thread = threading.Thread(target=work, name="netns-create")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return made[0]


def open_for_pid(pid: int) -> int:
    """Open the network namespace of a process."""
    return _open(f"/proc/{pid}/ns/net")


def current() -> int:
    """Open the network namespace of the calling thread."""
    return _open("/proc/thread-self/ns/net")


def identity(netns_fd: int) -> tuple[int, int]:
    """Return device and inode, which identify a namespace."""
    found = os.fstat(netns_fd)
    return found.st_dev, found.st_ino


@contextlib.contextmanager
def entered(netns_fd: int | None) -> Generator[None]:
    """Run the body with the calling thread in a namespace; `None` is the current one.

    The body must not await: the event loop would run other tasks inside the namespace.
    """
    if netns_fd is None:
        yield
        return
    home = current()
    try:
        _setns(netns_fd)
        try:
            yield
        finally:
            _setns(home)
    finally:
        os.close(home)


def socket_in(
    netns_fd: int | None, family: int, kind: int = socket.SOCK_STREAM, protocol: int = 0
) -> socket.socket:
    """Create a socket that belongs to a namespace, whichever thread uses it."""
    with entered(netns_fd):
        return socket.socket(family, kind, protocol)


def _open(path: str) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _setns(netns_fd: int) -> None:
    if _libc.setns(netns_fd, CLONE_NEWNET) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot enter a network namespace: {os.strerror(code)}")
