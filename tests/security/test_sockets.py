"""Sockets that a sandbox must not have: rare families, and protocols that CRIU cannot store."""

import json

import pytest

from tests.runtime.local.inside import run
from tests.security.battery.sockets import PRELUDE

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(120)]

_NEEDED = """
print(json.dumps([name(libc.socket(*one)) for one in
               [(1, 1, 0), (2, 1, 0), (2, 1 | 0o2004000, 6), (2, 2, 17), (10, 1, 6), (10, 2, 0),
                (16, 3, 0), (16, 2, 4)]] + [name(libc.socketpair(1, 5, 0, pair)),
                name(libc.setsockopt(stream.fileno(), 6, 1, (ctypes.c_int * 1)(1), 4))]))
"""


async def test_the_families_and_protocols_that_programs_need_are_open(attacker):
    """The battery shows that the others are closed."""
    script = f"/usr/bin/python3 - <<'EOF'\n{PRELUDE}\n{_NEEDED}\nEOF"
    assert set(json.loads((await run(attacker, script)).out)) == {"allowed"}


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
