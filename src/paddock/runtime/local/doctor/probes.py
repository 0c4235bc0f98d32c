"""The probes of the doctor; each one tries a feature of the machine.

A probe returns what it found, or raises an error with the reason; it leaves nothing behind.
`run_probe` converts the outcome to a `Check`. `report` selects the probes and renders the result.
"""

import contextlib
import errno
import os
import shutil
import signal
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator
from enum import StrEnum
from pathlib import Path

from msgspec import Struct

from paddock.kit.errors import PaddockError
from paddock.resources import quantity
from paddock.runtime.local.checkpoint import find_criu
from paddock.runtime.local.checkpoint.idmap import IdNamespaces
from paddock.runtime.local.checkpoint.threads import run_in_thread
from paddock.runtime.local.images.base import base_directory, is_built
from paddock.runtime.local.kernel import cgroups, syscalls
from paddock.runtime.local.net import netns, rtnetlink, shaping
from paddock.runtime.local.net.nft import open_firewall
from paddock.runtime.local.storage import (
    DiskReserve,
    btrfs_image_unavailable_reason,
    btrfs_ioctl,
)

_ID_BASE, _ID_COUNT = 0x60000000, 65536
_TIMEOUT_SECONDS = 20
_IFLA_IFNAME, _IFLA_LINKINFO, _IFLA_INFO_KIND = 3, 18, 1


class CheckStatus(StrEnum):
    """The result of a check."""

    OK = "ok"
    MISSING = "missing"


class Importance(StrEnum):
    """Whether sandboxes need the feature."""

    REQUIRED = "required"
    RECOMMENDED = "recommended"
    OPTIONAL = "optional"


class Check(Struct, frozen=True, kw_only=True):
    """The outcome of one probe."""

    name: str
    status: CheckStatus
    need: Importance
    found: str
    """What was found: a version, a path, or why it is missing."""
    gives: str
    """What the feature provides to sandboxes."""
    fix: str | None = None
    """The command that installs or enables it, if there is one."""


class MachineProbe(Struct, frozen=True, kw_only=True):
    """A probe; `run` returns what was found, or raises an error with the reason."""

    name: str
    need: Importance
    gives: str
    run: Callable[[], str]
    fix: str | None = None


class MissingError(Exception):
    """The feature is missing; the message says why."""


def run_probe(probe: MachineProbe) -> Check:
    """Run a probe; convert an error to a failed check."""
    status, found, fix = CheckStatus.OK, "", None
    try:
        found = probe.run()
    except PaddockError as problem:
        status, found, fix = CheckStatus.MISSING, problem.message, probe.fix or problem.hint
    except (MissingError, OSError, ValueError, subprocess.SubprocessError) as problem:
        status, found, fix = CheckStatus.MISSING, str(problem), probe.fix
    return Check(
        name=probe.name,
        status=status,
        need=probe.need,
        found=found,
        gives=probe.gives,
        fix=fix,
    )


def user_namespaces() -> str:
    """Create a user namespace, with an id map if run as root."""
    if os.geteuid() == 0:
        with _id_namespace():
            return f"a user namespace with {_ID_COUNT} ids was made"
    _in_child(lambda: syscalls.unshare(syscalls.CLONE_NEWUSER))
    return "an unprivileged user namespace was made"


def root() -> str:
    """Check for root."""
    if os.geteuid() != 0:
        raise MissingError("not root: control groups, network links and CRIU are not available")
    return "yes"


def overlay() -> str:
    """Mount an overlay over idmapped directories, as for every sandbox."""
    with tempfile.TemporaryDirectory(prefix="paddock-doctor-") as name, _id_namespace() as ids:

        def attempt() -> None:
            _private_mounts()
            for part in ("lower", "upper", "work", "mapped"):
                os.mkdir(f"{name}/{part}")
            tree = syscalls.open_tree(name)
            try:
                syscalls.mount_setattr(tree, attributes=0, userns_fd=ids)
                syscalls.move_mount(tree, f"{name}/mapped")
            finally:
                os.close(tree)
            options = ",".join(
                f"{key}dir={name}/mapped/{key}" for key in ("lower", "upper", "work")
            )
            syscalls.prctl(syscalls.PR_SET_SECUREBITS, syscalls.SECBIT_NO_SETUID_FIXUP)
            syscalls.set_file_ids(_ID_BASE, _ID_BASE)
            syscalls.mount("overlay", f"{name}/lower", "overlay", syscalls.MS_NODEV, options)
            Path(f"{name}/lower/file").touch()
            syscalls.set_file_ids(0, 0)
            if os.stat(f"{name}/upper/file").st_uid != 0:
                raise MissingError("files of a mapped overlay get the wrong owner")

        run_in_thread(lambda _: attempt(), name="doctor-overlay")
    return "an overlay was mounted over idmapped directories and written to"


def idmapped_mounts(state: Path) -> str:
    """Create an idmapped mount of the state directory's file system."""
    with _id_namespace() as ids:
        tree = syscalls.open_tree(str(_nearest_existing(state)))
        try:
            syscalls.mount_setattr(tree, attributes=0, userns_fd=ids)
        finally:
            os.close(tree)
    return f"the file system of {state} supports idmapped mounts"


def control_groups() -> str:
    """Find the mounted cgroup versions and their controllers."""
    layout = cgroups.detect()
    if layout.unified is None:
        raise MissingError("no cgroup v2 hierarchy that can be written to is mounted")
    missing = [name for name in ("cpu", "memory", "pids") if not layout.has(name)]
    if missing:
        raise MissingError(f"no controller for {', '.join(missing)}")
    v1 = sorted(set(layout.v1) - layout.v2)
    parts = [f"v2 at {layout.unified}"]
    parts += [f"v2 controllers: {', '.join(sorted(layout.v2))}"] if layout.v2 else []
    parts += [f"v1 controllers: {', '.join(v1)}"] if v1 else []
    return "; ".join(parts)


def disk_io() -> str:
    """Find the controller of disk I/O."""
    layout = cgroups.detect()
    if layout.has("io"):
        return "cgroup v2: reads and writes"
    if layout.has("blkio"):
        return "cgroup v1: reads, and writes of direct I/O"
    raise MissingError("no controller io or blkio")


def bandwidth() -> str:
    """Limit the rate of a link in a new network namespace."""
    if reason := shaping.unavailable_reason():
        raise MissingError(reason)
    return "the rate of a link was limited (tbf)"


def freezing() -> str:
    """Freeze and thaw a process."""
    layout = cgroups.detect()
    if layout.unified is None:
        raise MissingError("no cgroup v2 hierarchy that can be written to is mounted")
    group = Path(tempfile.mkdtemp(prefix="paddock-doctor-", dir=layout.unified))
    sleeper = subprocess.Popen(["sleep", "60"], stdin=subprocess.DEVNULL)
    try:
        (group / "cgroup.procs").write_text(str(sleeper.pid))
        (group / "cgroup.freeze").write_text("1")
        if not _wait_until(lambda: "frozen 1" in (group / "cgroup.events").read_text()):
            raise MissingError(f"a process did not freeze within {_TIMEOUT_SECONDS} seconds")
        return "a process was frozen and thawed"
    finally:
        (group / "cgroup.freeze").write_text("0")
        sleeper.send_signal(signal.SIGKILL)
        sleeper.wait()
        _wait_until(lambda: _is_removed(group))


def network_namespaces() -> str:
    """Create a network namespace with a veth pair."""
    there = netns.create()
    try:
        with rtnetlink.Channel(there) as channel:
            kind = rtnetlink.text(_IFLA_INFO_KIND, "veth")
            body = struct.pack("=BxHiII", 0, 0, 0, 0, 0)
            body += rtnetlink.text(_IFLA_IFNAME, "doctor")
            body += rtnetlink.nested(_IFLA_LINKINFO, kind)
            channel.request(
                rtnetlink.NetlinkRequest(
                    rtnetlink.RTM_NEWLINK, rtnetlink.CREATE, body, "make a veth pair"
                )
            )
    finally:
        os.close(there)
    return "a network namespace with a veth pair was made"


def nftables() -> str:
    """Add a rule in a new network namespace."""
    there = netns.create()
    try:
        firewall = open_firewall(there)
        try:
            firewall.run(
                [
                    "add table inet doctor",
                    "add chain inet doctor f { type filter hook forward priority 0; }",
                    "add rule inet doctor f ip daddr 192.0.2.1 drop",
                ]
            )
        finally:
            firewall.close()
    finally:
        os.close(there)
    return "rules were added in a network namespace"


def criu() -> str:
    """Find a CRIU that dumps and restores a process with TCP connections."""
    path, reason = find_criu()
    if path is None:
        raise MissingError(reason)
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    version = done.stdout.split("\n", 1)[0].removeprefix("Version: ")
    return f"{path} (version {version}) stored and restored a process with TCP connections"


def btrfs(state: Path) -> str:
    """Check whether the files of sandboxes can be on btrfs."""
    if btrfs_ioctl.is_btrfs(_nearest_existing(state)):
        return f"{state} is on btrfs"
    if reason := btrfs_image_unavailable_reason():
        raise MissingError(reason)
    return "a btrfs image can be created in the state directory"


def disk_space(state: Path, reserve_bytes: int | None) -> str:
    """Return what is free on the disk of the state directory."""
    reserve = DiskReserve(state, reserve_bytes)
    reserve.ensure_room("start new work")
    disk = reserve.status()
    return (
        f"{quantity.shown_bytes(disk.free_bytes)} free of "
        f"{quantity.shown_bytes(disk.total_bytes)}, "
        f"{quantity.shown_bytes(disk.reserve_bytes)} reserved"
    )


def swap() -> str:
    """Check for swap, to which the memory of frozen sandboxes is moved."""
    areas = [line.split()[0] for line in Path("/proc/swaps").read_text().splitlines()[1:]]
    if not areas:
        raise MissingError("no swap: frozen sandboxes keep their memory")
    compressed = any("zram" in area for area in areas)
    return f"{', '.join(areas)}{' (compressed memory)' if compressed else ''}"


def base_image() -> str:
    """Check whether the base image is built."""
    if not is_built():
        raise MissingError("the base image is not built")
    return str(base_directory())


def compiler() -> str:
    """Find a C compiler: the init of a sandbox is compiled on the machine."""
    path = shutil.which("gcc") or shutil.which("cc")
    if path is None:
        raise MissingError("there is no C compiler")
    return path


def _wait_until(condition: Callable[[], bool]) -> bool:
    """Wait until a condition holds, up to the timeout."""
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while not (is_true := condition()) and time.monotonic() < deadline:
        time.sleep(0.002)
    return is_true


def _is_removed(group: Path) -> bool:
    """Remove a group; return False while its last process is still exiting."""
    try:
        group.rmdir()
    except OSError as problem:
        return problem.errno != errno.EBUSY
    return True


@contextlib.contextmanager
def _id_namespace() -> Generator[int, None, None]:
    namespaces = IdNamespaces()
    try:
        yield namespaces.get(_ID_BASE, _ID_COUNT)
    finally:
        namespaces.close()


def _private_mounts() -> None:
    syscalls.unshare(syscalls.CLONE_NEWNS)
    syscalls.mount("", "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)


def _nearest_existing(path: Path) -> Path:
    """Return the directory, or its closest existing parent."""
    return next(one for one in (path.absolute(), *path.absolute().parents) if one.is_dir())


def _in_child(work: Callable[[], object]) -> None:
    """Run something that cannot be undone in a child process."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    if status != 0:
        raise MissingError("the kernel does not allow it for this user")
