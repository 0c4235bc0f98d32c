"""Find the main container and enter it.

With a shared process namespace the sidecar's /proc shows the processes of every container. Those of
the main container have the sandbox's uid in their environment. The image's users are read before
entering: a missing template user is added to a copy of /etc/passwd; the image is not changed.
"""

import asyncio
import contextlib
import os
import time
from pathlib import Path
from typing import NamedTuple

from paddock.envd import isolation
from paddock.envd.users import Users
from paddock.runtime.kubernetes import names

TIMEOUT_SECONDS = 300.0
_PAUSE_SECONDS = 0.05
_OVER_SECONDS = 0.5
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


def write_users(pid: int, user: str, user_id: int, directory: Path) -> None:
    """Write passwd and group files with the image's users and the template's user."""
    root = Path(f"/proc/{pid}/root")
    known = Users(f"{root}/etc/passwd", f"{root}/etc/group")
    for name in ("passwd", "group"):
        try:
            text = (root / "etc" / name).read_text(errors="surrogateescape")
        except OSError:
            text = ""
        if text and not text.endswith("\n"):
            text += "\n"
        if name == "passwd" and known.find("root") is None:
            text += "root:x:0:0::/root:/bin/sh\n"
        if name == "passwd" and known.find(user) is None:
            home = _ensure_home(root, user, user_id)
            text += f"{user}:x:{user_id}:{user_id}::{home}:/bin/sh\n"
        (directory / name).write_text(text, errors="surrogateescape")


def _ensure_home(root: Path, user: str, user_id: int) -> str:
    """Return the home directory of a user that the image lacks; create it if possible."""
    home = root / "home" / user
    try:
        for path in (home.parent, home):
            if path.is_symlink():  # it would be followed from here, not from inside
                return "/tmp"  # noqa: S108
            if not path.exists():
                path.mkdir(0o755)
                path.chmod(0o755)
                if path == home:
                    os.chown(home, user_id, user_id)
    except OSError:  # a read-only root
        return "/tmp"  # noqa: S108
    return f"/home/{user}" if home.is_dir() else "/tmp"  # noqa: S108


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
