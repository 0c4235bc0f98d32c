"""Find the main container and enter it.

With a shared process namespace the sidecar's /proc shows the processes of every container. Those of
the main container have the sandbox's uid in their environment. A missing template user is added to
a copy of /etc/passwd; the image gets its home directory only.
"""

import asyncio
import contextlib
import os
import stat
import time
from pathlib import Path
from typing import NamedTuple

from paddock.envd import isolation
from paddock.envd.users import Users
from paddock.runtime.kubernetes import names

TIMEOUT_SECONDS = 300.0
_PAUSE_SECONDS = 0.05
_OVER_SECONDS = 0.5
_MAX_BYTES = 1 << 20
_STARTED = 19
"""Index of the start time in the fields of `/proc/<pid>/stat` after the name."""


class NoMainContainerError(Exception):
    """The main container did not start."""


def find_main(uid: str, *, proc: Path = Path("/proc")) -> int | None:
    """Return the pid of the first process of the main container."""
    mark = f"{names.MARK}={uid}".encode()
    found: list[int] = []
    for entry in proc.iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # ended in between
        if mark in variables:
            found.append(int(entry.name))
    return min(found, default=None)


class MainContainer(NamedTuple):
    """The main container, identified by its first process."""

    pid: int
    handle: int | None
    """A pidfd of that process, readable when it has ended; `None` if the kernel has no pidfds."""
    instance_id: str


def wait_for_main(uid: str, *, seconds: float = TIMEOUT_SECONDS) -> MainContainer:
    """Wait for the main container's first process."""
    deadline = time.monotonic() + seconds
    while True:
        if (pid := find_main(uid)) is not None:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # ended in between
                return MainContainer(pid, _handle(pid), instance_id_of(pid))
        if time.monotonic() > deadline:
            raise NoMainContainerError(f"no process of sandbox {uid} appeared in {seconds:g} s")
        time.sleep(_PAUSE_SECONDS)


def instance_id_of(pid: int, *, proc: Path = Path("/proc")) -> str:
    """Return an id of this run of the main container: pid and start time."""
    # The program name may contain spaces and parentheses; the fields after it do not.
    numbers = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return f"{pid}-{numbers[_STARTED]}"


def _handle(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError:
        return None


async def wait_exit(main: MainContainer) -> None:
    """Wait until the main container ends."""
    if main.handle is not None:
        over = asyncio.Event()
        asyncio.get_running_loop().add_reader(main.handle, over.set)
        await over.wait()
        return
    with contextlib.suppress(ProcessLookupError):
        while True:
            with contextlib.suppress(PermissionError):  # it exists and has another owner
                os.kill(main.pid, 0)
            await asyncio.sleep(_OVER_SECONDS)


def write_users(user: str, user_id: int, directory: int) -> None:
    """Write passwd and group files with the image's users and the template's user.

    Called after `enter`: links of the image lead to its own files, not to those of the sidecar.
    """
    known = Users("/etc/passwd", "/etc/group")
    for name in ("passwd", "group"):
        text = _read(f"/etc/{name}")
        if text and not text.endswith(b"\n"):
            text += b"\n"
        if name == "passwd" and known.find("root") is None:
            text += b"root:x:0:0::/root:/bin/sh\n"
        if name == "passwd" and known.find(user) is None:
            home = _ensure_home(Path("/home", user), user_id)
            text += f"{user}:x:{user_id}:{user_id}::{home}:/bin/sh\n".encode()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=directory)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with os.fdopen(os.open(name, flags, 0o644, dir_fd=directory), "wb") as file:
            file.write(text)


def _read(path: str) -> bytes:
    """Return the content of a regular file, or nothing."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return b""
    with os.fdopen(fd, "rb") as file:
        return file.read(_MAX_BYTES) if stat.S_ISREG(os.fstat(fd).st_mode) else b""


def _ensure_home(home: Path, user_id: int) -> str:
    """Return the home directory of a user that the image lacks; create it if possible."""
    try:
        home.parent.mkdir(0o755, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            home.mkdir(0o755)
            # By descriptor: the container runs, and may have put a link there.
            fd = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                os.fchown(fd, user_id, user_id)
            finally:
                os.close(fd)
    except OSError:  # a read-only root
        return "/tmp"  # noqa: S108
    return str(home) if home.is_dir() else "/tmp"  # noqa: S108


def permitted_capabilities() -> frozenset[int]:
    """Return the permitted capabilities of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapPrm:"):
            mask = int(line.split()[1], 16)
            return frozenset(number for number in range(64) if mask >> number & 1)
    return frozenset()


def enter(pid: int) -> None:
    """Enter the main container's mount namespace and keep only the capabilities to serve."""
    kept = permitted_capabilities() & (isolation.FILE_CAPABILITIES | isolation.FORK_CAPABILITIES)
    namespace = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    try:
        isolation.enter({"mntns": namespace})
    finally:
        os.close(namespace)
    isolation.restrict(kept)
    isolation.seal_interpreter()
