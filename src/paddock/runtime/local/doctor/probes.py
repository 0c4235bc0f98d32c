"""The single questions of the doctor, each answered by trying.

Every function gives one `Check`, never raises, and leaves nothing behind. Which of them are asked,
and how answers are shown, is `doctor`'s business.
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
from paddock.runtime.local.checkpoint import find_criu
from paddock.runtime.local.checkpoint.idmap import IdNamespaces
from paddock.runtime.local.checkpoint.threads import in_thread
from paddock.runtime.local.images.base import base_directory, is_built
from paddock.runtime.local.kernel import cgroups, syscalls
from paddock.runtime.local.net import netns, rtnetlink
from paddock.runtime.local.net.nft import open_firewall
from paddock.runtime.local.storage import btrfs_ioctl, can_make_pool

_ID_BASE, _ID_COUNT = 0x60000000, 65536
_PATIENCE_SECONDS = 20
_IFLA_IFNAME, _IFLA_LINKINFO, _IFLA_INFO_KIND = 3, 18, 1


class Status(StrEnum):
    """How a question was answered."""

    OK = "ok"
    MISSING = "missing"


class Need(StrEnum):
    """How much depends on it."""

    REQUIRED = "required"
    RECOMMENDED = "recommended"
    OPTIONAL = "optional"


class Check(Struct, frozen=True, kw_only=True):
    """One question and its answer."""

    name: str
    status: Status
    need: Need
    found: str
    """What was seen: a version, a path, or why it is missing."""
    gives: str
    """What sandboxes gain by it."""
    fix: str | None = None
    """The exact command that installs it, where one does."""


class Question(Struct, frozen=True, kw_only=True):
    """What is asked; `ask` gives what was found, or raises with what is wrong."""

    name: str
    need: Need
    gives: str
    ask: Callable[[], str]
    fix: str | None = None


class MissingError(Exception):
    """It is not there; the message says why."""


def answer(question: Question) -> Check:
    """Ask, turning any refusal of the machine into an answer."""
    status, found, fix = Status.OK, "", None
    try:
        found = question.ask()
    except PaddockError as problem:
        status, found, fix = Status.MISSING, problem.message, question.fix or problem.hint
    except (MissingError, OSError, ValueError, subprocess.SubprocessError) as problem:
        status, found, fix = Status.MISSING, str(problem), question.fix
    return Check(
        name=question.name,
        status=status,
        need=question.need,
        found=found,
        gives=question.gives,
        fix=fix,
    )


def user_namespaces() -> str:
    """Make one with a map of ids (as root) or at all."""
    if os.geteuid() == 0:
        with _id_namespace():
            return f"a user namespace with {_ID_COUNT} ids was made"
    _in_child(lambda: syscalls.unshare(syscalls.CLONE_NEWUSER))
    return "an unprivileged user namespace was made"


def root() -> str:
    """Say what an unprivileged user goes without."""
    if os.geteuid() != 0:
        raise MissingError("not root: neither control groups nor links nor CRIU can be used")
    return "yes"


def overlay() -> str:
    """Mount one whose directories wear other ids, as every sandbox has it."""
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

        in_thread(lambda _: attempt(), name="doctor-overlay")
    return "an overlay was mounted over idmapped directories and written to"


def idmapped_mounts(state: Path) -> str:
    """Map a mount of the state directory's own file system."""
    with _id_namespace() as ids:
        tree = syscalls.open_tree(str(_existing(state)))
        try:
            syscalls.mount_setattr(tree, attributes=0, userns_fd=ids)
        finally:
            os.close(tree)
    return f"the file system of {state} can be mounted with other ids"


def control_groups() -> str:
    """Say which versions are mounted and where the controllers are."""
    layout = cgroups.detect()
    if layout.unified is None:
        raise MissingError("no cgroup v2 hierarchy that can be written to is mounted")
    missing = [name for name in ("cpu", "memory", "pids") if not layout.has(name)]
    if missing:
        raise MissingError(f"no controller for {', '.join(missing)}")
    v1 = sorted(set(layout.v1) - layout.v2)
    words = [f"v2 at {layout.unified}"]
    words += [f"v2 controllers: {', '.join(sorted(layout.v2))}"] if layout.v2 else []
    words += [f"v1 controllers: {', '.join(v1)}"] if v1 else []
    return "; ".join(words)


def freezing() -> str:
    """Freeze a process and thaw it."""
    layout = cgroups.detect()
    if layout.unified is None:
        raise MissingError("no cgroup v2 hierarchy that can be written to is mounted")
    group = Path(tempfile.mkdtemp(prefix="paddock-doctor-", dir=layout.unified))
    sleeper = subprocess.Popen(["sleep", "60"], stdin=subprocess.DEVNULL)
    try:
        (group / "cgroup.procs").write_text(str(sleeper.pid))
        (group / "cgroup.freeze").write_text("1")
        if not _comes_true(lambda: "frozen 1" in (group / "cgroup.events").read_text()):
            raise MissingError(f"a process did not freeze within {_PATIENCE_SECONDS} seconds")
        return "a process was frozen and thawed"
    finally:
        (group / "cgroup.freeze").write_text("0")
        sleeper.send_signal(signal.SIGKILL)
        sleeper.wait()
        _comes_true(lambda: _is_removed(group))


def network_namespaces() -> str:
    """Make one with a pair of links in it."""
    there = netns.create()
    try:
        with rtnetlink.Channel(there) as channel:
            kind = rtnetlink.text(_IFLA_INFO_KIND, "veth")
            body = struct.pack("=BxHiII", 0, 0, 0, 0, 0)
            body += rtnetlink.text(_IFLA_IFNAME, "doctor")
            body += rtnetlink.nested(_IFLA_LINKINFO, kind)
            channel.talk(
                rtnetlink.Request(rtnetlink.RTM_NEWLINK, rtnetlink.CREATE, body, "make a veth pair")
            )
    finally:
        os.close(there)
    return "a network namespace with a veth pair was made"


def nftables() -> str:
    """Add a rule in a namespace of its own."""
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
    return "rules were added in a namespace"


def criu() -> str:
    """Find one that dumps and restores a process with TCP connections."""
    path, reason = find_criu()
    if path is None:
        raise MissingError(reason)
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    version = said.stdout.split("\n", 1)[0].removeprefix("Version: ")
    return f"{path} (version {version}) stored and restored a process with TCP connections"


def btrfs(state: Path) -> str:
    """See whether sandboxes' files can lie on btrfs."""
    if btrfs_ioctl.is_btrfs(_existing(state)):
        return f"{state} lies on btrfs"
    if reason := can_make_pool():
        raise MissingError(reason)
    return "a btrfs image can be made in the state directory"


def swap() -> str:
    """See where the memory of frozen sandboxes could go."""
    areas = [line.split()[0] for line in Path("/proc/swaps").read_text().splitlines()[1:]]
    if not areas:
        raise MissingError("there is no swap: memory of frozen sandboxes stays where it is")
    compressed = any("zram" in area for area in areas)
    return f"{', '.join(areas)}{' (compressed memory)' if compressed else ''}"


def gvisor() -> str:
    """Find runsc."""
    path = shutil.which("runsc")
    if path is None:
        raise MissingError("runsc is not installed")
    said = subprocess.run(
        [path, "--version"], capture_output=True, text=True, timeout=10, check=False
    )
    return f"{path} {said.stdout.splitlines()[0] if said.stdout else ''}".strip()


def kvm() -> str:
    """Look at the processor's flags: a device node alone may be something that runs no guests."""
    flags = next(
        (line for line in Path("/proc/cpuinfo").read_text().splitlines() if line[:5] == "flags"), ""
    ).split()
    found = next((flag for flag in ("vmx", "svm") if flag in flags), None)
    if found is None:
        raise MissingError("the processor shows neither vmx nor svm here")
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        raise MissingError(f"the processor has {found}, and /dev/kvm cannot be opened")
    return f"{found} and /dev/kvm"


def base_image() -> str:
    """See whether the base image was built."""
    if not is_built():
        raise MissingError("the base image is not built")
    return str(base_directory())


def compiler() -> str:
    """Find a C compiler: the first process of a sandbox is compiled on the machine."""
    path = shutil.which("gcc") or shutil.which("cc")
    if path is None:
        raise MissingError("there is no C compiler")
    return path


def _comes_true(condition: Callable[[], bool]) -> bool:
    """Give a busy machine the time it needs."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not (is_true := condition()) and time.monotonic() < deadline:
        time.sleep(0.002)
    return is_true


def _is_removed(group: Path) -> bool:
    """Remove a group, unless its last process is still on its way out."""
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


def _existing(path: Path) -> Path:
    """The directory itself, or the closest one above that is there."""
    return next(one for one in (path.absolute(), *path.absolute().parents) if one.is_dir())


def _in_child(work: Callable[[], object]) -> None:
    """Do something that cannot be undone in a process that ends."""
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
        raise MissingError("the kernel refuses it to this user")
