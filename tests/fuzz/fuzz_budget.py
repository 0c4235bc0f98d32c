"""Examples and seconds of a fuzz test: enough for CI, or `--fuzz-examples` times as much.

`tests/conftest.py` sets both before any test is imported, since decorators read them then.
"""

import random

times = 1
"""The multiple of CI's number of examples."""
seed: str | None = None
"""The seed for other examples than CI's."""


def examples(usual: int) -> int:
    """Return the number of examples for a test with this many in CI."""
    return usual * times


def seconds(usual: float) -> float:
    """Return the time limit for a test with this one in CI."""
    return usual * times


def source(usual: int) -> random.Random:
    """Return a random source: the same in every run, unless a seed is set."""
    return random.Random(usual if seed is None else f"{seed}/{usual}")
