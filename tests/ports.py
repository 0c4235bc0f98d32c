"""Free ports for servers of tests that need a port before they listen."""

import contextlib
import os
import random
import socket

_PORTS = range(16_384, 32_768)
"""Below the ephemeral ports of the kernel, so that no connection takes one in between; above the
ports of the resolvers of nodes, which run beside the tests."""
_returned: set[int] = set()
"""Ports that were returned; their server may not listen yet."""


def free_ports(count: int) -> list[int]:
    """Return ports that are free and were not returned before in this run."""
    # Not the seeded generator: a repeated test would get ports that are still closing.
    generator, ports = random.SystemRandom(), _worker_ports()
    found: list[int] = []
    while len(found) < count:
        port = generator.choice(ports)
        if port not in _returned and _is_free(port):
            _returned.add(port)
            found.append(port)
    return found


def free_port() -> int:
    """Return a port that is free and was not returned before in this run."""
    return free_ports(1)[0]


def _worker_ports() -> range:
    """Return the ports of this worker: two workers must not choose the same one."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return _PORTS[worker::workers]


def _is_free(port: int) -> bool:
    with contextlib.closing(socket.socket()) as probe:
        try:
            probe.bind(("", port))  # its server may listen on every address
        except OSError:
            return False
    return True
