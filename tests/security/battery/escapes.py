"""Attempts to escape from a sandbox or to change the machine: all must fail."""

TOOLS = (
    "mount -t tmpfs none /mnt",
    "mount --bind /etc /mnt",
    "mount -o remount,rw /proc/sys",
    "mount -o remount,rw /sys",
    "umount /proc",
    "umount -l /dev/null",
    "unshare -U true",
    "unshare -m true",
    "unshare -n true",
    "nsenter -t 1 -m true",
    "mknod /tmp/sda b 8 0",
    "mknod /tmp/mem c 1 1",
    "chroot /proc/1/root true",
    "hostname other",
    "date -s 2001-01-01",
    "swapoff -a && swapon /tmp/x",
    "ip link add dummy0 type dummy",
    "ip addr add 10.9.9.9/8 dev lo",
    "dmesg",
    "ls /proc/1/root",
    "cat /proc/1/environ",
    "cat /proc/1/exe > /tmp/stolen",
    "cat /proc/1/maps",
    "cat /proc/1/fd/101",
    "cat /proc/kcore | head -c 1 | grep -q .",
    "head -c 1 /proc/kmsg",
    "cat /proc/timer_list",
    "ls /sys/kernel/debug/tracing",
    "cat /sys/firmware/dmi/tables/DMI",
    "chmod 777 /dev/null",
    "rm /dev/null",
    "test -e /sys/fs/cgroup/cgroup.procs -o -e /sys/fs/cgroup/unified/cgroup.procs",
)
"""Commands of root inside."""

SETTINGS = (
    "/proc/sys/kernel/core_pattern",
    "/proc/sys/kernel/modprobe",
    "/proc/sys/vm/drop_caches",
    "/proc/sys/kernel/hostname",
    "/proc/sys/net/ipv4/ip_forward",
    "/proc/sys/user/max_user_namespaces",
    "/proc/sysrq-trigger",
    "/proc/1/mem",
    "/proc/irq/default_smp_affinity",
    "/proc/acpi/wakeup",
    "/proc/mtrr",
    "/sys/power/state",
    "/sys/kernel/uevent_helper",
    "/sys/class/net/eth0/mtu",
    "/sys/module/overlay/parameters/metacopy",
)
"""Files that must not be writable."""

SYSCALLS = {
    "keyring": "libc.syscall(250, 0, 0, 0, 0)",
    "add_key": 'libc.syscall(248, b"user", b"k", b"v", 1, -3)',
    "bpf": "libc.syscall(321, 0, 0, 0)",
    "perf_event_open": "libc.syscall(298, 0, 0, 0, 0, 0)",
    "userfaultfd": "libc.syscall(323, 0)",
    "io_uring_setup": "libc.syscall(425, 1, 0)",
    "open_by_handle_at": "libc.syscall(304, -100, 0, 0)",
    "mount": 'libc.syscall(165, b"none", b"/mnt", b"tmpfs", 0, 0)',
    "umount2": 'libc.syscall(166, b"/proc", 2)',
    "pivot_root": 'libc.syscall(155, b".", b".")',
    "fsconfig": "libc.syscall(431, 0, 0, 0, 0, 0)",
    "fsmount": "libc.syscall(432, 0, 0, 0)",
    "fspick": 'libc.syscall(433, -100, b"/", 0)',
    "mount_setattr": 'libc.syscall(442, -100, b"/", 0, 0, 0)',
    "unshare_time": "libc.syscall(272, 0x80)",
    "request_key": 'libc.syscall(249, b"user", b"k", 0, 0)',
    "delete_module": 'libc.syscall(176, b"overlay", 0)',
    "init_module": "libc.syscall(175, 0, 0, b'')",
    "finit_module": "libc.syscall(313, 0, b'', 0)",
    "kexec_load": "libc.syscall(246, 0, 0, 0, 0)",
    "reboot": "libc.syscall(169, 0xfee1dead, 672274793, 0, 0)",
    "iopl": "libc.syscall(172, 3)",
    "setns": "libc.syscall(308, 0, 0)",
    "clone_newuser": "libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0)",
    "clone3": "libc.syscall(435, 0, 0)",
    "fsopen": 'libc.syscall(430, b"tmpfs", 0)',
    "open_tree_clone": 'libc.syscall(428, -100, b"/", 1)',
    "move_mount": 'libc.syscall(429, 0, b"", 0, b"", 4)',
    "fanotify_init": "libc.syscall(300, 0, 0)",
    "swapon": 'libc.syscall(167, b"/x", 0)',
    "acct": 'libc.syscall(163, b"/x")',
    "quotactl": "libc.syscall(179, 0, 0, 0, 0)",
    "settimeofday": "libc.syscall(164, 0, 0)",
    "adjtimex": "libc.syscall(159, 0)",
    "clock_settime": "libc.syscall(227, 0, 0)",
    "sethostname": 'libc.syscall(170, b"x", 1)',
    "syslog": "libc.syscall(103, 3, 0, 0)",
    "vhangup": "libc.syscall(153)",
    "ioperm": "libc.syscall(173, 0, 1, 1)",
    "modify_ldt": "libc.syscall(154, 0, 0, 0)",
    "quotactl_fd": "libc.syscall(443, 0, 0, 0, 0)",
    "statmount": "libc.syscall(457, 0, 0, 0, 0)",
    "tiocsti": 'libc.ioctl(os.openpty()[1], 0x5412, b"x")',
    "tiocsti_widened": 'libc.ioctl(os.openpty()[1], ctypes.c_ulong(1 << 32 | 0x5412), b"x")',
    "mknod_block": 'libc.syscall(133, b"/tmp/block", 0o60600, 8 << 8)',
    "mknod_whiteout": 'libc.syscall(133, b"/tmp/whiteout", 0o20600, 0)',
    "trace_init": "libc.ptrace(0x4206, 1, 0, 0)",
    "descriptor_of_init": "libc.syscall(438, libc.syscall(434, 1, 0), 101, 0)",
    "memory_of_init": (
        "libc.syscall(310, 1, *[(ctypes.c_size_t * 2)(id(0), 8), 1] * 2, ctypes.c_long(0))"
    ),
    "compare_with_init": "libc.syscall(312, os.getpid(), 1, 0, 0, 0)",
    "trusted_attribute": 'libc.setxattr(b"/tmp", b"trusted.overlay.opaque", b"y", 1, 0)',
    "lookup_dcookie": "libc.syscall(212, 0, 0, 0)",
    "vmsplice_i386": "libc.syscall(0x40000000 + 39)",
}

"""Calls in Python that must fail with EPERM or ENOSYS."""

SOCKETS = (
    "socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)",
    "socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP)",
    "socket.socket(socket.AF_INET6, socket.SOCK_RAW, 58)",
    "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)",
    "socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET)",
    "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 6)",  # NETLINK_XFRM
    "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 9)",  # audit
    "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12)",  # packet filters
)
"""Sockets that must be refused."""


def call_script(name: str) -> str:
    """Return a program for Python that exits with 0 if this call is refused."""
    return (
        "import ctypes, os, sys; libc = ctypes.CDLL(None, use_errno=True); "
        f"r = {SYSCALLS[name]}; e = ctypes.get_errno(); "
        "sys.exit(0 if r == -1 and e in (1, 38) else 9)"
    ).replace("b''", 'b""')
