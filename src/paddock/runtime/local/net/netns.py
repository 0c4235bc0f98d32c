"""Network namespaces by file descriptor: make one, work in one, be born in one.

No dependencies, so that gateways can use it as well. `setns` moves only the calling thread and
costs some microseconds; every function here returns with the thread back where it was.
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
    """Make an empty network namespace and give a descriptor that keeps it alive."""
    made: list[int] = []
    failed: list[OSError] = []

    def work() -> None:
        # A thread of its own: unshare cannot be taken back, and the thread dies with it.
        if _libc.unshare(CLONE_NEWNET) != 0:
            code = ctypes.get_errno()
            failed.append(OSError(code, f"cannot make a network namespace: {os.strerror(code)}"))
        else:
            made.append(_open("/proc/thread-self/ns/net"))

    thread = threading.Thread(target=work, name="netns-create")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return made[0]


def open_of(pid: int) -> int:
    """Open the network namespace a process lives in."""
    return _open(f"/proc/{pid}/ns/net")


def current() -> int:
    """Open the network namespace of the calling thread."""
    return _open("/proc/thread-self/ns/net")


def identity(netns_fd: int) -> tuple[int, int]:
    """Give what tells two namespaces apart: device and inode."""
    found = os.fstat(netns_fd)
    return found.st_dev, found.st_ino


@contextlib.contextmanager
def entered(netns_fd: int | None) -> Generator[None]:
    """Run the body with the calling thread in a namespace; `None` stays here.

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
    """Make a socket that lives in a namespace for ever, whichever thread uses it."""
    with entered(netns_fd):
        return socket.socket(family, kind, protocol)


def _open(path: str) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _setns(netns_fd: int) -> None:
    if _libc.setns(netns_fd, CLONE_NEWNET) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot enter a network namespace: {os.strerror(code)}")
