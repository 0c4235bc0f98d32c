"""Estimates the kernel memory of a sandbox that the kernel charges to no cgroup.

Most kernel objects are charged to the memory cgroup of the process that creates them. These are
not (measured with Linux 6.18): messages in the queues of netlink sockets, in corked UDP sockets and
in error queues, connections that no process has accepted, multicast groups, file locks, compiled
seccomp filters, and what is behind descriptors of timers and epoll. The kernel has no counter of
them per sandbox, but /proc lists them. Pending signals are charged, but all sandboxes of a machine
share one count. Compiled filters are also part of one pool of the machine (`bpf_jit_limit`).

Other objects of this kind are refused (`launch/native/init/confine.h`) or limited by the cgroup
(`cgroups.py`). SECURITY.md lists all of them.
"""

from collections import Counter
from collections.abc import Iterable

from msgspec import Struct

_HEADROOM = 0.75
"""The part of the allowance that may be in use when it is measured: more may follow at once."""

LOCK_BYTES = 224
DESCRIPTOR_BYTES = 352
"""The largest object behind a descriptor that is not charged: a timer."""
FILTER_BYTES = 84 << 10
"""A compiled seccomp filter of the maximum length, of divisions by a register. Others are smaller:
divisions by a number take 51 KiB, loads 15 KiB."""
CONNECTION_BYTES = 2560
"""A TCP connection that belongs to no process."""
TIME_WAIT_BYTES = 256
GROUP_BYTES = 4608
"""A multicast group with the maximum of 64 sources …"""
MEMBER_BYTES = 1280
"""… and each socket in it."""


MAX_FILTER_BYTES = 512 * FILTER_BYTES
"""An eighth of the pool that the kernel has by default, for all sandboxes together."""


class KernelMemoryBounds(Struct, frozen=True, kw_only=True):
    """What a sandbox may have beyond its memory limit: settings of the operator."""

    percent: int = 10
    """Share of its memory limit as uncharged kernel memory …"""
    least_bytes: int = 32 << 20
    """… but at least this."""
    pending_signals: int = 16_384
    """The default limit of a machine with 24 GiB is 96,000, for all sandboxes together."""


_BOUNDS = KernelMemoryBounds()


class ProcessFacts(Struct, frozen=True):
    """What /proc tells about one process of a sandbox."""

    pid: int
    uid: int
    descriptors: int = 0
    threads: int = 1
    filters: int = 0
    """Seccomp filters, including the one that every process of a sandbox has."""
    thread_filters: int = 0
    """Those of the other threads, which may share theirs with the first."""
    pending_signals: int = 0
    """Of all processes with the same user."""

    @property
    def own_filters(self) -> int:
        """Filters beyond the one that every process has; several may share one."""
        return max(self.filters - 1, 0) + self.thread_filters


class UnchargedMemory(Struct, frozen=True):
    """An estimate, by the kind of object."""

    netlink: int = 0
    udp: int = 0
    tcp: int = 0
    multicast: int = 0
    locks: int = 0
    filters: int = 0
    descriptors: int = 0
    pending_signals: int = 0
    """A number, not bytes."""

    @property
    def total(self) -> int:
        """The sum in bytes."""
        return sum(self._kinds.values())

    @property
    def largest(self) -> str:
        """The kind that takes most, in the words of a report."""
        kinds = self._kinds
        return max(kinds, key=lambda kind: kinds[kind])

    @property
    def _kinds(self) -> dict[str, int]:
        return {
            "unread messages of netlink sockets": self.netlink,
            "unsent data and errors of UDP sockets": self.udp,
            "connections that nobody accepts": self.tcp,
            "multicast groups": self.multicast,
            "file locks": self.locks,
            "seccomp filters": self.filters,
            "open descriptors": self.descriptors,
        }


def allowance(memory_limit: int, bounds: KernelMemoryBounds = _BOUNDS) -> int:
    """Return how many uncharged bytes a sandbox with this limit may have."""
    return max(memory_limit * bounds.percent // 100, bounds.least_bytes)


def socket_limit(memory_limit: int, bounds: KernelMemoryBounds = _BOUNDS) -> int:
    """Return the limit of data in TCP and UDP sockets on cgroup v1.

    What has been received is charged without a check, so a sixth more was measured.
    """
    return allowance(memory_limit, bounds) * 4 // 5


def excess(
    used: UnchargedMemory, memory_limit: int, bounds: KernelMemoryBounds = _BOUNDS
) -> str | None:
    """Return why a sandbox must end, or `None` if it may continue."""
    if used.pending_signals > bounds.pending_signals:
        return (
            f"it has {used.pending_signals} pending signals, more than the "
            f"{bounds.pending_signals} that a sandbox may have"
        )
    if used.filters > MAX_FILTER_BYTES:
        return (
            f"its seccomp filters took {used.filters >> 20} MiB of the pool of all sandboxes; "
            f"{MAX_FILTER_BYTES >> 20} MiB are allowed"
        )
    allowed = allowance(memory_limit, bounds)
    if used.total > allowed * _HEADROOM:
        return (
            f"its {used.largest} took {used.total >> 20} MiB of kernel memory beyond its limit; "
            f"{allowed >> 20} MiB are allowed"
        )
    return None


def excess_of_all(filters: int, pool: int) -> str | None:
    """Return why one of all sandboxes must end, or `None`, by their filters and the pool of them.

    Half of the pool is left for new sandboxes and other programs of the machine.
    """
    if filters <= pool // 2:
        return None
    return (
        f"it has most of the {filters >> 20} MiB of seccomp filters of all sandboxes; "
        f"{pool // 2 >> 20} MiB are allowed"
    )


def estimate(
    processes: Iterable[ProcessFacts],
    *,
    netlink: int,
    udp: int,
    locks: int,
    tcp: int = 0,
    multicast: int = 0,
    compiled_filters: int | None = None,
) -> UnchargedMemory:
    """Sum up what the processes of a sandbox hold; `locks` is a number, the others are bytes.

    `compiled_filters` is what all filters of the machine take, if known: those of processes and
    threads, which may share them with their parents, take no more.
    """
    descriptors = filters = 0
    signals: dict[int, int] = {}
    for process in processes:
        descriptors += process.descriptors
        filters += process.own_filters * FILTER_BYTES
        signals[process.uid] = max(process.pending_signals, signals.get(process.uid, 0))
    return UnchargedMemory(
        netlink=netlink,
        udp=udp,
        tcp=tcp,
        multicast=multicast,
        locks=locks * LOCK_BYTES,
        filters=filters if compiled_filters is None else min(filters, compiled_filters),
        descriptors=descriptors * DESCRIPTOR_BYTES,
        pending_signals=sum(signals.values()),
    )


def netlink_bytes(table: str) -> int:
    """Return the bytes in the queues of a table such as /proc/net/netlink."""
    return sum(int(row[4]) + int(row[5]) for row in _rows(table, columns=10))


def udp_bytes(table: str) -> int:
    """Return the unsent bytes in a table such as /proc/net/udp."""
    return sum(int(row[4].partition(":")[0], 16) for row in _rows(table, columns=12))


def unread_udp_bytes(table: str) -> int:
    """Return the bytes in receive and error queues in a table such as /proc/net/udp."""
    return sum(int(row[4].partition(":")[2], 16) for row in _rows(table, columns=12))


class TcpSockets(Struct, frozen=True):
    """Numbers of TCP sockets."""

    open: int
    waiting: int
    """In TIME_WAIT."""

    @property
    def total(self) -> int:
        """In any state."""
        return self.open + self.waiting

    def least_bytes(self, descriptors: int) -> int:
        """Return the least size of those without a descriptor, if there are so many in all."""
        unowned = max(self.open - descriptors, 0)
        return unowned * CONNECTION_BYTES + self.waiting * TIME_WAIT_BYTES


def tcp_sockets(*sockstats: str) -> TcpSockets:
    """Return the numbers of TCP sockets in texts such as /proc/net/sockstat."""
    opened = waiting = 0
    for line in "\n".join(sockstats).split("\n"):
        name, *row = line.split() or [""]
        if name in ("TCP:", "TCP6:"):
            values = dict(zip(row[::2], row[1::2], strict=False))
            opened += int(values["inuse"])
            waiting += int(values.get("tw", 0))
    return TcpSockets(opened, waiting)


def unaccepted_bytes(table: str) -> int:
    """Return the size of the connections in a table such as /proc/net/tcp without a process."""
    states = [row[3] for row in _rows(table, columns=10) if row[9] == "0"]
    waiting = states.count("06")
    return waiting * TIME_WAIT_BYTES + (len(states) - waiting) * CONNECTION_BYTES


def multicast_bytes(igmp: str, igmp6: str) -> int:
    """Return the size of the groups in /proc/net/igmp and /proc/net/igmp6."""
    rows = [line.split() for line in igmp.split("\n") if line.startswith("\t")]
    users = [int(row[1]) for row in rows if len(row) == 4]
    users += [int(row[3]) for line in igmp6.split("\n") if len(row := line.split()) == 6]
    return len(users) * GROUP_BYTES + sum(users) * MEMBER_BYTES


def compiled_filter_bytes(vmallocinfo: str) -> int:
    """Return the size of all compiled filters of the machine, from /proc/vmallocinfo."""
    rows = (line.split(None, 2) for line in vmallocinfo.split("\n") if "bpf_prog_pack" in line)
    return sum(int(row[1]) for row in rows)


def filter_count(status: str) -> int:
    """Return the number of seccomp filters of a thread, from its status in /proc."""
    _, found, rest = status.partition("\nSeccomp_filters:")
    return int(rest.partition("\n")[0]) if found else 1


def process_facts(pid: int, status: str, descriptors: int) -> ProcessFacts:
    """Parse /proc/PID/status."""
    fields = _fields(status)
    return ProcessFacts(
        pid=pid,
        uid=int(fields["Uid"].split()[0]),
        descriptors=descriptors,
        threads=int(fields.get("Threads", "1")),
        filters=int(fields.get("Seccomp_filters", "1")),
        pending_signals=int(fields["SigQ"].partition("/")[0]),
    )


class LockTable:
    """The file locks of the machine, as /proc/locks lists them."""

    def __init__(self, table: str) -> None:
        self._by_pid: Counter[int] = Counter()
        self._by_device: Counter[str] = Counter()
        for line in table.split("\n"):
            row = line.split()
            if len(row) < 6:
                continue
            # A process that waits for a lock is listed with an arrow.
            pid, place = (row[5], row[6]) if row[1] == "->" else (row[4], row[5])
            if pid == "-1":  # a lock of an open file, which has no process
                self._by_device[place.rpartition(":")[0]] += 1
            else:
                self._by_pid[int(pid)] += 1

    def count(self, pids: Iterable[int], devices: Iterable[str]) -> int:
        """Return the number of locks that these processes have, or that are on these devices."""
        held = sum(self._by_pid[pid] for pid in pids)
        return held + sum(self._by_device[device] for device in devices)

    @property
    def has_file_locks(self) -> bool:
        """Whether some locks belong to no process."""
        return bool(self._by_device)


def devices(mountinfo: str) -> frozenset[str]:
    """Return the device numbers of the mounts in a mountinfo, as /proc/locks writes them."""
    found: set[str] = set()
    for line in mountinfo.split("\n"):
        row = line.split(" ", 3)
        if len(row) == 4:
            major, _, minor = row[2].partition(":")
            found.add(f"{int(major):02x}:{int(minor):02x}")
    return frozenset(found)


def _fields(status: str) -> dict[str, str]:
    fields: dict[str, str] = {}
    for line in status.split("\n"):
        name, _, value = line.partition(":")
        fields[name] = value
    return fields


def _rows(table: str, *, columns: int) -> Iterable[list[str]]:
    for line in table.split("\n")[1:]:
        row = line.split()
        if len(row) >= columns:
            yield row
