"""Kernel memory that no cgroup counts: what /proc lists, and what a sandbox may have."""

import pytest

from paddock.runtime.local.kernel import uncharged
from paddock.runtime.local.kernel.uncharged import LockTable, ProcessFacts, UnchargedMemory

NETLINK = """\
sk               Eth Pid        Groups   Rmem     Wmem     Dump  Locks    Drops    Inode
00000000d484f1aa 0   42822      00000000 35328    0        1     2        0        157958
00000000f427dc7e 0   43519      00000000 0        512      0     2        0        165734
"""
UDP = """\
   sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode \
ref pointer drops
12653: 0100DF0A:3C03 00000000:0000 07 0000EA60:00000300 00:00000000 00000000     0        0 147175 \
2 00000000a1b3d214 0
"""
LOCKS = """\
1: FLOCK  ADVISORY  WRITE 41 fe:00:9977866 0 EOF
2: POSIX  ADVISORY  WRITE 41 00:2f:12 0 0
3: POSIX  ADVISORY  READ  42 00:2f:12 2 2
3: -> POSIX  ADVISORY  WRITE 41 00:2f:12 2 2
4: OFDLCK ADVISORY  WRITE -1 00:2f:13 0 0
5: OFDLCK ADVISORY  WRITE -1 00:30:13 0 0
"""
STATUS = """\
Name:\tpython3
Pid:\t77
Uid:\t100033\t100033\t100033\t100033
SigQ:\t300/96349
Seccomp:\t2
Seccomp_filters:\t4
"""


def test_the_queues_of_netlink_sockets_are_summed():
    assert uncharged.netlink_bytes(NETLINK) == 35328 + 512
    assert uncharged.netlink_bytes("") == 0


def test_unsent_bytes_of_udp_sockets_are_summed():
    assert uncharged.udp_bytes(UDP) == 60_000


def test_locks_are_counted_by_process_and_those_of_open_files_by_device():
    table = LockTable(LOCKS)

    assert table.has_file_locks
    assert table.count([41], []) == 3
    assert table.count([41, 42], ["00:2f"]) == 5
    assert table.count([99], ["00:31"]) == 0


def test_devices_of_mounts_are_written_as_in_the_table_of_locks():
    mountinfo = "22 1 0:47 / / rw - overlay overlay rw\n23 22 254:0 /x /y rw - ext4 /dev/vda rw\n"
    assert uncharged.devices(mountinfo) == {"00:2f", "fe:00"}


def test_the_status_of_a_process_is_parsed():
    assert uncharged.process_facts(77, STATUS, descriptors=9) == ProcessFacts(
        pid=77, uid=100033, descriptors=9, filters=4, pending_signals=300
    )


def test_signals_of_a_user_count_once_and_the_filter_of_every_process_not_at_all():
    used = uncharged.estimate(
        [
            ProcessFacts(pid=1, uid=5, descriptors=10, filters=1, pending_signals=700),
            ProcessFacts(pid=2, uid=5, descriptors=20, filters=3, pending_signals=700),
            ProcessFacts(pid=3, uid=6, pending_signals=1),
        ],
        netlink=100,
        udp=10,
        locks=2,
    )

    assert used.pending_signals == 701
    assert used.filters == 2 * uncharged.FILTER_BYTES
    assert used.descriptors == 30 * uncharged.DESCRIPTOR_BYTES
    assert used.total == 110 + used.filters + used.descriptors + 2 * uncharged.LOCK_BYTES


@pytest.mark.parametrize(
    ("limit", "bytes_allowed"), [(256 << 20, 32 << 20), (2 << 30, (2 << 30) // 10)]
)
def test_a_sandbox_may_have_a_tenth_of_its_limit_but_at_least_32_mib(limit, bytes_allowed):
    assert uncharged.allowance(limit) == bytes_allowed
    assert uncharged.excess(UnchargedMemory(netlink=bytes_allowed // 2), limit) is None
    reason = uncharged.excess(UnchargedMemory(netlink=bytes_allowed, locks=5), limit)
    assert reason is not None
    assert reason.startswith("its unread messages of netlink sockets took")


def test_more_pending_signals_than_a_share_end_a_sandbox():
    used = UnchargedMemory(pending_signals=uncharged.MAX_PENDING_SIGNALS + 1)
    assert "pending signals" in (uncharged.excess(used, 1 << 30) or "")
