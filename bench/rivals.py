"""Where other systems run: a private mount namespace, and control groups that are removed.

podman, conmon, crun and runc keep state in /run, and leave empty control groups in every hierarchy.
In `private_mounts` their state is in memory and ends with the namespace; `control_group` and
`removed_group` remove their groups, `removed_file` removes a cache. The groups are registered with
the leak check, which then finds what could not be removed.
"""

import contextlib
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from tests.leaks import note_group  # noqa: E402

LABEL = "paddock-bench"
UNIFIED = "/sys/fs/cgroup/unified"
HIDE = (
    "mount -n -t tmpfs -o mode=755 tmpfs /run && "
    f"if mountpoint -q {UNIFIED}; then mount -n -t tmpfs tmpfs {UNIFIED}; fi"
)
"""crun refuses the hybrid layout of cgroups; with the unified half hidden it works. It is covered,
not unmounted: crun makes directories there, and below the mount they would stay.
"""
GROUPS = Path("/sys/fs/cgroup")
END_SECONDS = 30.0
"""How long conmon may take to clean up after its container."""

_numbers = itertools.count()


@contextlib.contextmanager
def private_mounts(*, network: bool = False, checkpoints: bool = False) -> Generator[list[str]]:
    """Yield the command prefix that enters a new mount namespace, if wanted with its own network.

    `checkpoints` are made of containers there, so they get a control group of their own.

    Everything that is to see the same mounts must use the same prefix: what is mounted in one
    namespace cannot be unmounted in another.
    """
    flags = ["-m", *(["-n"] if network else [])]
    script = f"{HIDE} && echo ready && exec sleep infinity"
    command = ["unshare", *flags, "--propagation", "private", "sh", "-c", script]
    with (
        _unified_group() if checkpoints else contextlib.nullcontext([]) as enter_group,
        subprocess.Popen(command, stdout=subprocess.PIPE) as keeper,
    ):
        try:
            assert keeper.stdout is not None
            if not keeper.stdout.readline():
                raise OSError("cannot create a mount namespace; run as root")
            entered = f"/proc/{keeper.pid}/ns"
            yield [
                *enter_group,
                "nsenter",
                f"--mount={entered}/mnt",
                *([f"--net={entered}/net"] if network else []),
            ]
            _await_others(keeper.pid)
        finally:
            keeper.kill()


@contextlib.contextmanager
def _unified_group() -> Generator[list[str]]:
    """Yield the command prefix that joins a group of its own in the unified hierarchy, if any.

    crun does not see that hierarchy, so its containers stay in the group of their caller. CRIU
    stores the groups below it with the container and creates them again with a restore: below the
    root these would be the groups of all sandboxes of the machine.
    """
    if not os.path.ismount(UNIFIED):
        yield []
        return
    with control_group() as name:
        group = Path(UNIFIED, name)
        group.mkdir()
        yield ["sh", "-c", f'echo $$ >{group}/cgroup.procs && exec "$@"', "sh"]


def _await_others(keeper: int) -> None:
    """Wait until no other process is in the namespace: conmon cleans up after its container.

    What stays longer is found by the leak check.
    """
    deadline = time.monotonic() + END_SECONDS
    while _others(keeper) and time.monotonic() < deadline:
        time.sleep(0.02)


def _others(keeper: int) -> list[int]:
    """Return the other processes in the mount namespace of this one."""
    namespace = Path(f"/proc/{keeper}/ns/mnt").readlink()
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/ns/mnt"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            if path.readlink() == namespace and int(path.parts[2]) != keeper:
                found.append(int(path.parts[2]))
    return found


def unique_name() -> str:
    """Return a name that no other benchmark uses now."""
    return f"{LABEL}-{os.getpid()}-{next(_numbers)}"


@contextlib.contextmanager
def control_group() -> Generator[str]:
    """Yield the name of a control group for one system; remove it with all groups below."""
    with removed_group(unique_name()) as name:
        yield name


@contextlib.contextmanager
def removed_group(name: str) -> Generator[str]:
    """Remove a group of this name at the end, unless it was there before and so is another's."""
    if any(path.is_dir() for path in _places(name)):
        yield name
        return
    note_group(name)
    try:
        yield name
    finally:
        for path in _places(name):
            for directory, _, _ in os.walk(path, topdown=False):
                Path(directory).rmdir()


@contextlib.contextmanager
def removed_file(path: Path) -> Generator[None]:
    """Remove a file at the end, with its empty directories, unless they were there before."""
    new = [place for place in (path, *path.parents) if not place.exists()]
    yield
    for place in new:
        with contextlib.suppress(FileNotFoundError):
            if place == path:
                place.unlink()
            elif not any(place.iterdir()):
                place.rmdir()


def _places(name: str) -> list[Path]:
    """Return where a group of this name can be, once in each hierarchy."""
    hierarchies = {GROUPS, *(path.resolve() for path in GROUPS.iterdir() if path.is_dir())}
    return [hierarchy / name for hierarchy in sorted(hierarchies)]
