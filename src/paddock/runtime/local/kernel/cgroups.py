"""Cgroups of sandboxes: v2 to freeze and kill, v2 or v1 for limits, depending on the machine.

Each node has one cgroup `paddock-<id>` per hierarchy, and each sandbox one below it, named by its
slot. The unified hierarchy is always used to clone into (`CLONE_INTO_CGROUP`), freeze and kill;
controllers are used in the hierarchy they are mounted in.
"""

import contextlib
import errno
import os
from pathlib import Path

from msgspec import Struct

from paddock.envd.memory_kills import MemoryKills
from paddock.runtime.local.kernel import uncharged
from paddock.runtime.local.kernel.uncharged import KernelMemoryBounds
from paddock.runtime.port import Limits

_PERIOD_US = 100_000
_CONTROLLERS = ("cpu", "memory", "pids")
_DUMP = "-dump"
"""Suffix of the cgroup in which a sandbox is dumped, where its own one cannot be used."""
STAY = "-"
"""Instead of a v2 cgroup: that of the process that starts another one."""
_PROBE = "io-probe"
_PROBE_LIMITS = Limits(
    io_read_bandwidth=1 << 20, io_write_bandwidth=1 << 20, io_read_iops=100, io_write_iops=100
)
_IO_MAX = ("rbps", "wbps", "riops", "wiops")
_THROTTLE = ("read_bps", "write_bps", "read_iops", "write_iops")
_OOM_FILES = {True: "memory.events", False: "memory.oom_control"}
"""By whether the memory controller is v2."""


class CgroupLayout(Struct, frozen=True):
    """Mount points and controllers of the machine's cgroup hierarchies."""

    unified: str | None
    """Mount point of cgroup v2, or `None`."""
    v2: frozenset[str]
    """Controllers of the unified hierarchy."""
    v1: dict[str, str]
    """Mount points of controllers that are not in the unified hierarchy."""

    def has(self, controller: str) -> bool:
        """Whether a controller is available in any hierarchy."""
        return controller in self.v2 or controller in self.v1


def detect(mountinfo: str | None = None) -> CgroupLayout:
    """Read the layout from mountinfo."""
    if mountinfo is None:
        mountinfo = Path("/proc/self/mountinfo").read_text()
    unified: str | None = None
    v1: dict[str, str] = {}
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        target = before.split()[4]
        kind, _, options = after.split(maxsplit=2)
        if kind == "cgroup2" and unified is None:
            unified = target
        elif kind == "cgroup":
            for option in options.split(","):
                if option in (*_CONTROLLERS, "cpuacct", "blkio"):
                    v1.setdefault(option, target)
    v2: frozenset[str] = frozenset()
    if unified is not None and not os.access(unified, os.W_OK):
        unified = None
    if unified is not None:
        listed = Path(unified, "cgroup.controllers").read_text().split()
        v2 = frozenset(listed) & {*_CONTROLLERS, "io"}
    writable = {name: path for name, path in v1.items() if os.access(path, os.W_OK)}
    return CgroupLayout(unified, v2, writable)


class CgroupUsage(Struct, frozen=True):
    """Resource usage of a cgroup."""

    cpu_seconds: float
    memory_bytes: int
    cache_bytes: int
    oom_kills: int
    pids: int


class Cgroups:
    """The cgroups of one node; names are those of sandboxes."""

    def __init__(
        self,
        node: str,
        layout: CgroupLayout | None = None,
        bounds: KernelMemoryBounds | None = None,
    ) -> None:
        self.layout = layout or detect()
        self.bounds = bounds or KernelMemoryBounds()
        """What sandboxes may have beyond their memory limit."""
        self._parent = f"paddock-{node}"
        self.disks: tuple[str, ...] = ()
        """The disks (`major:minor`) whose use is limited."""
        self.io_unavailable_reason = "it was not checked"
        """Why disk I/O cannot be limited; empty if it can."""

    @property
    def is_usable(self) -> bool:
        """Whether there is a writable cgroup v2 hierarchy."""
        return self.layout.unified is not None

    def prepare(self) -> None:
        """Create the node's own cgroups; existing ones are kept."""
        if self.layout.unified is None:
            return
        root = Path(self.layout.unified)
        _enable(root, self.layout.v2)
        (root / self._parent).mkdir(exist_ok=True)
        _enable(root / self._parent, self.layout.v2)
        for mount in set(self.layout.v1.values()):
            Path(mount, self._parent).mkdir(exist_ok=True)

    def unified(self, name: str) -> str:
        """Return the v2 directory that a sandbox is cloned into."""
        return f"{self.layout.unified}/{self._parent}/{name}"

    def joins(self, name: str) -> list[str]:
        """Return the v1 directories that a sandbox joins after the clone."""
        return [f"{m}/{self._parent}/{name}" for m in sorted(set(self.layout.v1.values()))]

    def dump_groups(self, name: str, limits: Limits) -> list[str]:
        """Return the directories of cgroups in which a sandbox is dumped, with its CPU limit.

        CRIU cannot run in the v2 cgroup of the sandbox, which is frozen meanwhile. Where that one
        limits the CPU, the dump has another one beside it. `-` is the cgroup of the caller.
        """
        if self.layout.unified is None:
            return []
        if "cpu" in self.layout.v2:
            at = self.unified(name) + _DUMP
            with contextlib.suppress(FileExistsError):
                os.mkdir(at)
            _write(f"{at}/cpu.max", self._cpu_max(limits))
            return [at]
        mounts = {self.layout.v1[c] for c in ("cpu", "cpuacct") if c in self.layout.v1}
        joins = [f"{mount}/{self._parent}/{name}" for mount in sorted(mounts)]
        return [STAY, *joins] if joins else []

    def directories(self, name: str) -> dict[str, str]:
        """Return the directories to read usage from, by the names that envd uses."""
        if self.layout.unified is None:
            return {}
        if "memory" in self.layout.v2:
            return {"cgroup": self.unified(name)}
        found: dict[str, str] = {}
        if (at := self._at("memory", name)) is not None:
            found["cgroup_memory"] = at
        if (at := self._at("cpuacct", name) or self._at("cpu", name)) is not None:
            found["cgroup_cpu"] = at
        return found

    def parents(self) -> tuple[str, str, str]:
        """Return the directories above sandboxes' cgroups: unified, of memory, of CPU time."""
        unified = f"{self.layout.unified}/{self._parent}"
        memory = self.layout.v1.get("memory")
        cpu = self.layout.v1.get("cpuacct")
        return (
            unified,
            f"{memory}/{self._parent}" if memory else unified,
            f"{cpu}/{self._parent}" if cpu else unified,
        )

    def create(self, name: str) -> None:
        """Create a sandbox's cgroups."""
        for path in (self.unified(name), *self.joins(name)):
            with contextlib.suppress(FileExistsError):
                os.mkdir(path)
                # envd reads below descriptors of these with other ids, and the node's umask
                # would deny that.
                os.chmod(path, 0o711)  # noqa: S103 - search permission only

    def limit(self, name: str, limits: Limits) -> None:
        """Set limits; 0 and `None` mean no limit."""
        if (at := self._at("memory", name)) is not None:
            if "memory" in self.layout.v2:
                _write(f"{at}/memory.max", str(limits.memory_bytes or "max"))
                # As much swap as memory: a frozen sandbox can be paged out completely, and one
                # sandbox cannot fill the swap.
                _write(f"{at}/memory.swap.max", str(limits.memory_bytes or "max"), optional=True)
                _write(f"{at}/memory.oom.group", "0", optional=True)
            else:
                # memsw is memory plus swap and must never be below the memory limit.
                _write(f"{at}/memory.memsw.limit_in_bytes", "-1", optional=True)
                _write(f"{at}/memory.limit_in_bytes", str(limits.memory_bytes or -1))
                if limits.memory_bytes:
                    both = str(2 * limits.memory_bytes)
                    _write(f"{at}/memory.memsw.limit_in_bytes", both, optional=True)
                # Data in sockets of TCP and UDP is not part of the memory limit of version 1.
                sockets = -1
                if limits.memory_bytes:
                    sockets = uncharged.socket_limit(limits.memory_bytes, self.bounds)
                _write(f"{at}/memory.kmem.tcp.limit_in_bytes", str(sockets), optional=True)
        if (at := self._at("pids", name)) is not None:
            _write(f"{at}/pids.max", str(limits.pids or "max"))
        if (at := self._at("cpu", name)) is not None:
            if "cpu" in self.layout.v2:
                _write(f"{at}/cpu.max", self._cpu_max(limits))
            else:
                quota = limits.cpu_millis * _PERIOD_US // 1000 if limits.cpu_millis else None
                _write(f"{at}/cpu.cfs_period_us", str(_PERIOD_US))
                _write(f"{at}/cpu.cfs_quota_us", str(quota or -1))

    @property
    def limits_cached_writes(self) -> bool:
        """Whether limits of writes apply to those through the page cache too."""
        return "io" in self.layout.v2

    def open_io(self, disks: tuple[str, ...]) -> None:
        """Limit the use of these disks from now on, if a first cgroup can be limited."""
        self.disks, self.io_unavailable_reason = disks, ""
        if not self.is_usable:
            self.io_unavailable_reason = "there is no writable cgroup v2 hierarchy"
        elif not (self.layout.has("io") or self.layout.has("blkio")):
            self.io_unavailable_reason = "the kernel offers no io or blkio controller"
        elif not disks:
            self.io_unavailable_reason = "the files of sandboxes are not on a disk"
        else:
            try:
                self.create(_PROBE)
                try:
                    self.limit_io(_PROBE, _PROBE_LIMITS)
                finally:
                    self.remove(_PROBE)
            except OSError as error:
                self.io_unavailable_reason = f"the kernel refuses it: {error.strerror}"
        if self.io_unavailable_reason:
            self.disks = ()

    def limit_io(self, name: str, limits: Limits) -> None:
        """Set limits of disk I/O, which start without any; 0 and `None` mean no limit.

        Version 1 counts what a process reads, and writes with direct I/O; version 2 also what the
        kernel writes back for it.
        """
        rates = (
            limits.io_read_bandwidth,
            limits.io_write_bandwidth,
            limits.io_read_iops,
            limits.io_write_iops,
        )
        if (at := self._at("io", name)) is not None:
            words = [f"{key}={rate or 'max'}" for key, rate in zip(_IO_MAX, rates, strict=True)]
            for disk in self.disks:
                _write(f"{at}/io.max", f"{disk} {' '.join(words)}")
        elif (at := self._at("blkio", name)) is not None:
            for disk in self.disks:
                for file, rate in zip(_THROTTLE, rates, strict=True):
                    _write(f"{at}/blkio.throttle.{file}_device", f"{disk} {rate or 0}")

    def freeze(self, name: str, *, frozen: bool) -> None:
        """Freeze or thaw a cgroup; returns before all processes are frozen."""
        _write(f"{self.unified(name)}/cgroup.freeze", "1" if frozen else "0")

    def is_frozen(self, name: str) -> bool:
        """Whether every process of a cgroup is frozen."""
        return _flag(f"{self.unified(name)}/cgroup.events", "frozen") == 1

    def is_populated(self, name: str) -> bool:
        """Whether a cgroup has processes."""
        return _flag(f"{self.unified(name)}/cgroup.events", "populated") == 1

    def kill(self, name: str) -> None:
        """Kill every process of a cgroup, also frozen ones."""
        try:
            _write(f"{self.unified(name)}/cgroup.kill", "1")
        except FileNotFoundError:
            return

    def remove(self, name: str) -> bool:
        """Remove a sandbox's empty cgroups; whether all are gone."""
        is_gone = True
        for path in (self.unified(name), self.unified(name) + _DUMP, *self.joins(name)):
            try:
                os.rmdir(path)
            except FileNotFoundError:
                continue
            except OSError as problem:
                if problem.errno != errno.EBUSY:
                    raise
                is_gone = False
        return is_gone

    def names(self) -> set[str]:
        """Return the names of all cgroups of sandboxes, in any hierarchy."""
        if self.layout.unified is None:
            return set()
        parents = {self.layout.unified, *self.layout.v1.values()}
        found: set[str] = set()
        for mount in parents:
            with (
                contextlib.suppress(FileNotFoundError),
                os.scandir(f"{mount}/{self._parent}") as entries,
            ):
                found.update(entry.name.removesuffix(_DUMP) for entry in entries if entry.is_dir())
        return found

    def processes(self, name: str) -> list[int]:
        """Return the pids of a cgroup."""
        with contextlib.suppress(FileNotFoundError):
            text = _text(f"{self.unified(name)}/cgroup.procs")
            return [int(pid) for pid in text.split() if pid != "0"]
        return []

    def threads(self, name: str) -> list[int]:
        """Return the thread ids of a cgroup."""
        with contextlib.suppress(FileNotFoundError):
            return [int(tid) for tid in _text(f"{self.unified(name)}/cgroup.threads").split()]
        return []

    def close(self) -> None:
        """Remove the node's own cgroups where no sandbox is left."""
        for mount in {self.layout.unified, *self.layout.v1.values()} - {None}:
            with contextlib.suppress(OSError):
                os.rmdir(f"{mount}/{self._parent}")

    def usage(self, name: str) -> CgroupUsage:
        """Measure a cgroup; without a controller its values are 0."""
        memory, cache, oom, pids = 0, 0, 0, 0
        if (at := self._at("memory", name)) is not None:
            with contextlib.suppress(FileNotFoundError):
                memory, cache, oom = self._memory(at)
        if (at := self._at("pids", name)) is not None:
            with contextlib.suppress(FileNotFoundError):
                pids = int(_text(f"{at}/pids.current"))
        return CgroupUsage(self.cpu_seconds(name), memory, cache, oom, pids)

    def cpu_seconds(self, name: str) -> float:
        """Return the CPU time of a cgroup; cheaper than `usage`."""
        with contextlib.suppress(FileNotFoundError):
            if "cpuacct" in self.layout.v1 and (at := self._at("cpuacct", name)) is not None:
                return int(_text(f"{at}/cpuacct.usage")) / 1e9
            text = _text(f"{self.unified(name)}/cpu.stat")
            return _fields(text).get("usage_usec", 0) / 1e6
        return 0.0

    def socket_bytes(self, name: str) -> int:
        """Return the charged data in sockets of a cgroup."""
        at = self._at("memory", name)
        if at is None:
            return 0
        with contextlib.suppress(FileNotFoundError):
            if "memory" in self.layout.v2:
                return _fields(_text(f"{at}/memory.stat")).get("sock", 0)
            return int(_text(f"{at}/memory.kmem.tcp.usage_in_bytes"))
        return 0

    def oom_kills(self, name: str) -> int:
        """Return the number of OOM kills in a cgroup; cheaper than `usage`."""
        at = self._at("memory", name)
        is_v2 = "memory" in self.layout.v2
        return 0 if at is None else _flag(f"{at}/{_OOM_FILES[is_v2]}", "oom_kill")

    def oom_cause(self, name: str) -> str:
        """Return which memory was used up when processes of a cgroup were killed."""
        at = self._at("memory", name)
        try:
            fd = os.open(at or "", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            return "it ran out of memory"
        try:
            return MemoryKills(fd, "memory" in self.layout.v2).cause()
        finally:
            os.close(fd)

    @staticmethod
    def _cpu_max(limits: Limits) -> str:
        quota = limits.cpu_millis * _PERIOD_US // 1000 if limits.cpu_millis else None
        return f"{quota or 'max'} {_PERIOD_US}"

    def _memory(self, at: str) -> tuple[int, int, int]:
        is_v2 = "memory" in self.layout.v2
        stat = _fields(_text(f"{at}/memory.stat"))
        oom = _flag(f"{at}/{_OOM_FILES[is_v2]}", "oom_kill")
        if is_v2:
            current = int(_text(f"{at}/memory.current"))
            return current - stat.get("file", 0), stat.get("file", 0), oom
        current = int(_text(f"{at}/memory.usage_in_bytes"))
        return max(0, current - stat.get("cache", 0)), stat.get("cache", 0), oom

    def _at(self, controller: str, name: str) -> str | None:
        if self.layout.unified is None:
            return None
        if controller in self.layout.v2:
            return self.unified(name)
        mount = self.layout.v1.get(controller)
        return f"{mount}/{self._parent}/{name}" if mount else None


def _enable(directory: Path, controllers: frozenset[str]) -> None:
    for name in sorted(controllers):
        # A threaded or populated cgroup above may forbid a controller; it is then missing below,
        # and `limit` fails with the file's name.
        _write(f"{directory}/cgroup.subtree_control", f"+{name}", optional=True)


def _text(path: str) -> str:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 1 << 20).decode()
    finally:
        os.close(fd)


def _write(path: str, text: str, *, optional: bool = False) -> None:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)
    except OSError as problem:
        if not optional:
            raise OSError(problem.errno, f"cannot write {text!r} to {path}") from problem


def _fields(text: str) -> dict[str, int]:
    pairs = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _flag(path: str, name: str) -> int:
    try:
        return _fields(_text(path)).get(name, 0)
    except FileNotFoundError:
        return 0
