"""Attacks on init, whose end is the end of the sandbox and which starts all commands."""

PRELUDE = """
import ctypes, errno, os, signal
libc = ctypes.CDLL(None, use_errno=True)
call = libc.syscall
one, mask = (ctypes.c_ulong * 2)(1, 1), (ctypes.c_ulong * 16)(1)
param, attr = (ctypes.c_int * 1)(0), (ctypes.c_uint * 16)(64, 5)
wide = ctypes.c_ulong(7 << 32 | 1)
memory = ctypes.create_string_buffer(4096)
vector = (ctypes.c_size_t * 2)(ctypes.addressof(memory), 4096)
pidfd = os.pidfd_open(1)
"""

CALLS = {
    "limit of CPU time": "call(302, 1, 0, one, 0)",
    "limit of descriptors": "call(302, 1, 7, one, 0)",
    "limit with a wide pid": "call(302, wide, 0, one, 0)",
    "affinity": "call(203, 1, 128, mask)",
    "parameters": "call(142, 1, param)",
    "idle scheduler": "call(144, 1, 5, param)",
    "idle attributes": "call(314, 1, attr, 0)",
    "nice": "call(141, 0, 1, 19)",
    "nice of the group": "call(141, 1, 1, 19)",
    "nice of the user": "call(141, 2, 0, 19)",
    "idle disk priority": "call(251, 1, 1, 3 << 13)",
    "disk priority of the group": "call(251, 2, 1, 3 << 13)",
    "disk priority of the user": "call(251, 3, 0, 3 << 13)",
    "advice": "call(440, pidfd, vector, 1, 21, 0)",
    "release": "call(448, pidfd, 0)",
    "descriptor": "call(438, pidfd, 101, 0)",
    "comparison": "call(312, os.getpid(), 1, 0, 0, 0)",
    "trace": "call(101, 0x4206, 1, 0, 0)",
    "memory": "call(311, 1, vector, 1, vector, 1, 0)",
    "session": "call(109, 0, 1)",
}
"""Calls that must fail."""

FILES = (
    *("oom_score_adj", "oom_adj", "autogroup", "coredump_filter", "clear_refs", "sched"),
    *("timerslack_ns", "comm", "setgroups", "uid_map", "mem", "task/1/oom_score_adj"),
    *("task/1/comm", "../1/oom_score_adj", "cwd/proc/1/oom_score_adj"),
)
"""Files below /proc/1 that must not be writable."""

SIGNALS = f"""{PRELUDE}
for number in range(1, 65):
    try:
        os.kill(1, number)
        signal.pidfd_send_signal(pidfd, number)
    except OSError:
        pass
print("sent")
"""
"""Sends every signal: init must still run afterwards."""


def call_script(name: str) -> str:
    """Return a program that prints whether this call was refused."""
    return f"{PRELUDE}\nprint('done' if {CALLS[name]} >= 0 else 'refused')\n"
