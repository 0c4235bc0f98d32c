"""How much the fuzz tests try: what suits CI, or `--fuzz-examples` times as much.

`tests/conftest.py` sets both before any test is imported, since decorators read them then.
"""

import random

times = 1
"""How many times CI's number of examples."""
seed: str | None = None
"""What the examples are drawn from, where other ones than CI's are wanted."""


def examples(usual: int) -> int:
    """How many examples a test tries that has so many in CI."""
    return usual * times


def seconds(usual: float) -> float:
    """How long it may take for them."""
    return usual * times


def source(usual: int) -> random.Random:
    """Choices of a test that draws its own: the same in every run, unless others are wanted."""
    return random.Random(usual if seed is None else f"{seed}/{usual}")
