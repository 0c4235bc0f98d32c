"""Sockets that a sandbox must not have: rare families, and protocols that CRIU cannot store."""

import errno
import json

import pytest

from tests.runtime.local.inside import run

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(120)]

_TRY = """
import ctypes, errno, json, socket
libc = ctypes.CDLL(None, use_errno=True)
def name(result):
    return "allowed" if result >= 0 else errno.errorcode[ctypes.get_errno()]
pair = (ctypes.c_int * 2)()
INET = (2, 10)
stream, datagram = socket.socket(), socket.socket(2, 2)
print(json.dumps({
    "families": {f: name(libc.socket(f, 1, 0)) for f in range(3, 46) if f not in (10, 16)},
    "pairs": {f: name(libc.socketpair(f, t, 0, pair)) for f in range(3, 46) if f not in (10, 16)
              for t in (1, 2, 5)},
    "protocols": {f"{f} {p}": name(libc.socket(f, t, p)) for f in INET for t in (1, 2, 3)
                  for p in range(2, 300) if p not in (6, 17, 58)},
    "types": {f"{f} {t}": name(libc.socket(f, t, 0)) for f in INET for t in range(4, 16)},
    "widened": [name(libc.syscall(41, ctypes.c_ulong(1 << 32 | 2), 1, 262)),
                name(libc.syscall(41, 2, ctypes.c_ulong(1 << 32 | 1),
                                  ctypes.c_ulong(1 << 32 | 262)))],
    "needed": [name(libc.socket(*one)) for one in
               [(1, 1, 0), (2, 1, 0), (2, 1 | 0o2004000, 6), (2, 2, 17), (10, 1, 6), (10, 2, 0),
                (16, 3, 0), (16, 2, 4)]] + [name(libc.socketpair(1, 5, 0, pair))],
    "options": [name(libc.setsockopt(stream.fileno(), 6, 31, ulp, len(ulp)))
                for ulp in (b"tls", b"smc", b"espintcp", b"mptcp")]
               + [name(libc.setsockopt(datagram.fileno(), 17, 100,
                                       (ctypes.c_int * 1)(2), 4))],
    "usual": name(libc.setsockopt(stream.fileno(), 6, 1, (ctypes.c_int * 1)(1), 4)),
}))
"""


async def test_only_families_and_protocols_that_programs_need_are_open(attacker):
    outcome = await run(attacker, f"/usr/bin/python3 - <<'EOF'\n{_TRY}\nEOF")
    assert outcome.status == 0, outcome
    found = json.loads(outcome.out)
    assert set(found["families"].values()) == {"EAFNOSUPPORT"}
    assert set(found["pairs"].values()) == {"EAFNOSUPPORT"}
    # As a kernel without them: programs fall back to TCP and UDP.
    assert set(found["protocols"].values()) == {"EPROTONOSUPPORT"}
    assert set(found["types"].values()) == {"ESOCKTNOSUPPORT"}
    assert found["widened"] == ["EPROTONOSUPPORT"] * 2
    assert set(found["options"]) == {errno.errorcode[errno.ENOPROTOOPT]}
    assert set(found["needed"]) == {"allowed"}
    assert found["usual"] == "allowed"


async def test_a_program_that_prefers_mptcp_falls_back_to_tcp(attacker):
    script = """
import socket
try:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262)
except OSError:
    listener = socket.socket()
listener.bind(("127.0.0.1", 0)); listener.listen()
client = socket.create_connection(listener.getsockname())
server, _ = listener.accept()
client.sendall(b"hello")
print(server.recv(9).decode(), listener.getsockopt(socket.SOL_SOCKET, socket.SO_PROTOCOL))
"""
    assert (await run(attacker, f"/usr/bin/python3 - <<'EOF'\n{script}\nEOF")).out == "hello 6\n"
