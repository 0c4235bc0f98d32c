"""Addresses of loopback for pods: each is given once, whoever else tests on this machine.

The first that a process asks for takes a block of them: its name is the kernel's, which gives it
to nobody else until the process ends, however it ends.
"""

import itertools
import random
import socket
from collections.abc import Iterator
from functools import cache

_BLOCKS = range(64, 251)
"""By their second number; 127.0 is everybody's."""
_OF_THIRD = 250


def fresh_address() -> str:
    """Give an address that nobody had before, in this process or in another that lives."""
    return next(_addresses())


@cache
def _addresses() -> Iterator[str]:
    second = _block()
    return (
        f"127.{second}.{number // _OF_THIRD}.{number % _OF_THIRD + 1}"
        for number in itertools.count()
    )


def _block() -> int:
    # Not the seeded generator: every worker of a run would try the same first.
    for second in random.SystemRandom().sample(_BLOCKS, len(_BLOCKS)):
        lock = socket.socket(socket.AF_UNIX)
        try:
            lock.bind(f"\0paddock-test-127.{second}")
        except OSError:
            lock.close()
            continue
        lock.detach()  # for as long as this process lives
        return second
    raise RuntimeError("every block of addresses is taken")
