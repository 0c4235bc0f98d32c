"""Loopback addresses for pods, unique among all test processes of this machine.

A process reserves a block of addresses on first use, by binding an abstract unix socket: the kernel
releases it when the process ends.
"""

import itertools
import random
import socket
from collections.abc import Iterator
from functools import cache

_BLOCKS = range(64, 251)
"""Second octets of the blocks; 127.0 is in general use."""
_OF_THIRD = 250


def fresh_address() -> str:
    """Return an unused address, unique among running processes."""
    return next(_addresses())


@cache
def _addresses() -> Iterator[str]:
    second = _block()
    return (
        f"127.{second}.{number // _OF_THIRD}.{number % _OF_THIRD + 1}"
        for number in itertools.count()
    )


def _block() -> int:
    # Not the seeded generator: all workers of a run would try the same block first.
    for second in random.SystemRandom().sample(_BLOCKS, len(_BLOCKS)):
        lock = socket.socket(socket.AF_UNIX)
        try:
            lock.bind(f"\0paddock-test-127.{second}")
        except OSError:
            lock.close()
            continue
        lock.detach()  # for as long as this process lives
        return second
    raise RuntimeError("all blocks of addresses are in use")
