"""Sockets that a sandbox must not have: rare families, and protocols that CRIU cannot store."""

PRELUDE = """
import ctypes, errno, json, socket
libc = ctypes.CDLL(None, use_errno=True)
def name(result):
    return "allowed" if result >= 0 else errno.errorcode[ctypes.get_errno()]
pair = (ctypes.c_int * 2)()
INET = (2, 10)
stream, datagram = socket.socket(), socket.socket(2, 2)
rare = [family for family in range(3, 46) if family not in (10, 16)]
"""

REFUSED = {
    "rare families": ("EAFNOSUPPORT", "name(libc.socket(f, 1, 0)) for f in rare"),
    "pairs of rare families": (
        "EAFNOSUPPORT",
        "name(libc.socketpair(f, t, 0, pair)) for f in rare for t in (1, 2, 5)",
    ),
    # As a kernel without them: programs fall back to TCP and UDP.
    "protocols": (
        "EPROTONOSUPPORT",
        (
            "name(libc.socket(f, t, p)) for f in INET for t in (1, 2, 3) for p in range(2, 300)"
            " if p not in (6, 17, 58)"
        ),
    ),
    "types": (
        "ESOCKTNOSUPPORT",
        "name(libc.socket(f, t, 0)) for f in INET for t in range(4, 16)",
    ),
    "widened numbers": (
        "EPROTONOSUPPORT",
        (
            "name(libc.syscall(41, *map(ctypes.c_ulong, numbers)))"
            " for numbers in ((1 << 32 | 2, 1, 262), (2, 1 << 32 | 1, 1 << 32 | 262))"
        ),
    ),
    "protocols on top of TCP": (
        "ENOPROTOOPT",
        (
            "name(libc.setsockopt(stream.fileno(), 6, 31, ulp, len(ulp)))"
            " for ulp in (b'tls', b'smc', b'espintcp', b'mptcp')"
        ),
    ),
    "encapsulation in UDP": (
        "ENOPROTOOPT",
        "name(libc.setsockopt(datagram.fileno(), 17, 100, (ctypes.c_int * 1)(2), 4)) for _ in (1,)",
    ),
}
"""Name → (error of every attempt, attempts as a generator)."""


def script(name: str) -> str:
    """Return a program that prints the errors of all attempts, each once."""
    return f"{PRELUDE}\nprint(*sorted(set({REFUSED[name][1]})))\n"
