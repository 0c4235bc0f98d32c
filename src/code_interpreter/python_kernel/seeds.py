"""Seeds random generators again in a clone of the sandbox, so that no two clones draw the same.

The server requests it before the first run in a clone. Code that already runs is reached by a
signal, which a hook of clones sends (`clone_hook.sh`).
"""

import random
import signal
import sys

SIGNAL = signal.SIGURG
"""It has no effect on processes that do not expect it."""


def reseed() -> None:
    """Seed the global generators of `random` and NumPy from the kernel of the machine."""
    random.seed()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def install() -> None:
    """Seed again on the signal."""
    signal.signal(SIGNAL, lambda *_: reseed())
