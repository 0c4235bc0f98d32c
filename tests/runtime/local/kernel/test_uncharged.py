"""Kernel memory that no cgroup counts: what /proc lists, and what a sandbox may have."""

import pytest

from paddock.runtime.local.kernel import uncharged
from paddock.runtime.local.kernel.uncharged import (
    KernelMemoryBounds,
    LockTable,
    ProcessFacts,
    TcpSockets,
    UnchargedMemory,
)

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
Threads:\t3
SigQ:\t300/96349
Seccomp:\t2
Seccomp_filters:\t4
"""


def test_the_queues_of_netlink_sockets_are_summed():
    assert uncharged.netlink_bytes(NETLINK) == 35328 + 512
    assert uncharged.netlink_bytes("") == 0


def test_unsent_bytes_of_udp_sockets_are_summed():
    assert uncharged.udp_bytes(UDP) == 60_000


def test_unread_bytes_and_errors_of_udp_sockets_are_summed():
    assert uncharged.unread_udp_bytes(UDP + UDP.split("\n", 1)[1]) == 2 * 0x300
    assert uncharged.unread_udp_bytes("") == 0


def test_tcp_sockets_of_both_families_and_in_time_wait_are_counted():
    v4 = "sockets: used 9\nTCP: inuse 4 orphan 1 tw 30 alloc 7 mem 1\nUDP: inuse 2 mem 0\n"
    assert uncharged.tcp_sockets(v4, "TCP6: inuse 500\nUDP6: inuse 1\n") == TcpSockets(504, 30)
    assert uncharged.tcp_sockets("", "").total == 0


@pytest.mark.parametrize(("descriptors", "expected"), [(0, 100), (60, 40), (200, 0)])
def test_more_tcp_sockets_than_descriptors_belong_to_no_process(descriptors: int, expected: int):
    least = TcpSockets(100, 10).least_bytes(descriptors)
    assert least == expected * uncharged.CONNECTION_BYTES + 10 * uncharged.TIME_WAIT_BYTES


def test_only_tcp_connections_without_a_process_are_summed():
    row = "   1: 0100007F:1F90 0100007F:A001 {} 00000000:00000000 00:00000000 00000000 0 0 {} 1 0\n"
    head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid\n"
    table = head + row.format("01", 4711) + row.format("0A", 4712) + row.format("08", 0)
    table += 2 * row.format("06", 0)

    expected = uncharged.CONNECTION_BYTES + 2 * uncharged.TIME_WAIT_BYTES
    assert uncharged.unaccepted_bytes(table) == expected
    assert uncharged.unaccepted_bytes("") == 0


def test_multicast_groups_and_their_members_are_summed():
    igmp = (
        "Idx\tDevice    : Count Querier\tGroup    Users Timer\tReporter\n"
        "1\tlo        :     1      V3\n"
        "\t\t\t\t010000E0     1 0:00000000\t\t0\n"
    )
    igmp6 = (
        "1    lo              ff020000000000000000000000000001     1 0000000C 0\n"
        "2    eth0            ff020000000000000000000000000002    20 00000004 0\n"
    )

    used = uncharged.multicast_bytes(igmp, igmp6)
    assert used == 3 * uncharged.GROUP_BYTES + 22 * uncharged.MEMBER_BYTES
    assert uncharged.multicast_bytes("", "") == 0


def test_only_compiled_filters_of_the_list_of_mappings_are_summed():
    mappings = (
        "0xffffc000-0xffffd000    8192 alloc_thread_stack_node+0x1 pages=1 vmalloc\n"
        "0xffffffffc0000000-0xffffffffc0201000 2101248 bpf_prog_pack_alloc+0x9 pages=512 vmalloc\n"
    )
    assert uncharged.compiled_filter_bytes(mappings) == 2101248


@pytest.mark.parametrize(("filters", "of_threads"), [(1, 99), (100, 0), (50, 50)])
def test_filters_take_at_most_what_all_of_the_machine_take(filters: int, of_threads: int):
    process = ProcessFacts(pid=1, uid=5, threads=100, filters=filters, thread_filters=of_threads)

    def size(compiled: int | None) -> int:
        used = uncharged.estimate([process], netlink=0, udp=0, locks=0, compiled_filters=compiled)
        return used.filters

    assert size(None) == size(1 << 40) == 99 * uncharged.FILTER_BYTES
    assert size(2 << 20) == 2 << 20


@pytest.mark.parametrize(
    ("kind", "words"),
    [("udp", "errors of UDP sockets"), ("tcp", "nobody accepts"), ("multicast", "multicast")],
)
def test_the_reason_names_the_kind_and_the_sum_includes_it(kind, words):
    used = UnchargedMemory(**{kind: 33 << 20})
    assert used.total == 33 << 20
    assert words in (uncharged.excess(used, 256 << 20) or "")


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
        pid=77, uid=100033, descriptors=9, threads=3, filters=4, pending_signals=300
    )
    assert uncharged.filter_count(STATUS) == 4
    assert uncharged.filter_count("Name:\tkernel without the number\n") == 1


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
    used = UnchargedMemory(pending_signals=KernelMemoryBounds().pending_signals + 1)
    assert "pending signals" in (uncharged.excess(used, 1 << 30) or "")


def test_filters_beyond_a_fixed_number_end_a_sandbox_whatever_its_memory():
    used = UnchargedMemory(filters=uncharged.MAX_FILTER_BYTES)
    assert uncharged.excess(used, 64 << 30) is None
    used = UnchargedMemory(filters=uncharged.MAX_FILTER_BYTES + 1)
    assert "seccomp filters" in (uncharged.excess(used, 64 << 30) or "")


def test_all_sandboxes_together_may_have_half_of_the_pool_of_filters():
    assert uncharged.excess_of_all(250 << 20, 500 << 20) is None
    assert "250 MiB are allowed" in (uncharged.excess_of_all(251 << 20, 500 << 20) or "")


def test_data_in_sockets_stays_below_the_allowance_although_it_exceeds_its_limit():
    assert uncharged.socket_limit(256 << 20) * 37 // 32 < uncharged.allowance(256 << 20)


def test_the_operator_sets_the_share_of_uncharged_memory():
    bounds = KernelMemoryBounds(percent=25, least_bytes=64 << 20)
    assert uncharged.allowance(1 << 30, bounds) == 256 << 20
    assert uncharged.allowance(128 << 20, bounds) == 64 << 20
    assert uncharged.socket_limit(1 << 30, bounds) < 256 << 20
    used = UnchargedMemory(netlink=150 << 20)
    assert uncharged.excess(used, 1 << 30, bounds) is None
    assert uncharged.excess(used, 1 << 30) is not None
