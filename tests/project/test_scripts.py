"""`scripts/test` and `scripts/test-kubernetes` leave no test out."""

import itertools
import re
import tomllib

from _pytest.mark.expression import Expression

from tests.newcomer.blocks import ROOT

SCRIPTS = ("test", "test-kubernetes")
MARKERS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]


def selections() -> list[Expression]:
    """Return which markers each run of pytest selects."""
    texts = [(ROOT / "scripts" / name).read_text() for name in SCRIPTS]
    quoted = re.compile(r'pytest .* -m (?:"([^"]+)"|(\w+))')
    found = ["".join(names) for script in texts for names in quoted.findall(script)]
    assert len(found) >= 3, found
    return [Expression.compile(text) for text in found]


def test_every_test_belongs_to_a_run() -> None:
    names = [line.split(":")[0] for line in MARKERS["markers"]]
    counts = range(len(names) + 1)
    for marks in itertools.chain.from_iterable(itertools.combinations(names, n) for n in counts):
        chosen = [item for item in selections() if item.evaluate(frozenset(marks).__contains__)]
        assert chosen, f"no run has tests that are marked {marks}"
