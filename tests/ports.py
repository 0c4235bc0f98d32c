"""Ports for servers of tests, which learn their port before they listen on it."""

import contextlib
import os
import random
import socket

_PORTS = range(16_384, 32_768)
"""Below those that the kernel gives to outgoing connections: nobody takes one in between. Above
those of the resolvers of nodes, which come and go beside the test on addresses of their own."""
_given: set[int] = set()
"""Whoever was given one may not listen on it yet."""


def free_ports(count: int) -> list[int]:
    """Find ports that nobody listens on, nor anybody else of this run was given."""
    # Not the seeded generator: tests that are run again would meet ports that are still closing.
    dice, ours = random.SystemRandom(), _share()
    found: list[int] = []
    while len(found) < count:
        port = dice.choice(ours)
        if port not in _given and _is_free(port):
            _given.add(port)
            found.append(port)
    return found


def free_port() -> int:
    """Find a port that nobody listens on, nor anybody else of this run was given."""
    return free_ports(1)[0]


def _share() -> range:
    """Give this worker's part: another may look at the same moment, before either listens."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return _PORTS[worker::workers]


def _is_free(port: int) -> bool:
    with contextlib.closing(socket.socket()) as probe:
        try:
            probe.bind(("", port))  # whoever is given it may listen on every address
        except OSError:
            return False
    return True
