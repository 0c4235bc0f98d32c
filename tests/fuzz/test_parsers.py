"""Any bytes into every parser of untrusted input: no crash, no ambiguity.

`by_coverage` fuzzes one target for any time.
"""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz import fuzz_budget
from tests.fuzz.targets import CORPUS, TARGETS

SEEDS = {
    name: [path.read_bytes() for path in sorted((CORPUS / name).glob("*"))] for name in TARGETS
}
KEPT = [
    pytest.param(name, path, id=f"{name}-{path.name}")
    for name in TARGETS
    for path in sorted((CORPUS / name).glob("*"))
]


def inputs(name: str) -> st.SearchStrategy[bytes]:
    """Pieces of the corpus, mixed with random bytes."""
    pieces = sorted({piece for seed in SEEDS[name] for piece in _pieces(seed)})
    known = st.sampled_from(pieces) if pieces else st.just(b"")
    noise = st.one_of(st.binary(max_size=12), st.sampled_from([b"\r\n", b"\0", b"\n", b" ", b"%"]))
    spliced = st.lists(st.one_of(known, known, noise), max_size=12).map(b"".join)
    return st.one_of(st.sampled_from(SEEDS[name]) if SEEDS[name] else spliced, spliced)


def _pieces(seed: bytes) -> list[bytes]:
    lines = seed.splitlines(keepends=True)
    return [seed, *lines, *(part for line in lines for part in line.split(b" "))]


@pytest.mark.parametrize(("name", "path"), KEPT)
def test_the_corpus_is_handled_correctly(name: str, path) -> None:
    TARGETS[name](path.read_bytes())


@pytest.mark.timeout(fuzz_budget.seconds(180))
@pytest.mark.parametrize("name", TARGETS)
def test_any_input_is_parsed_or_refused(name: str) -> None:
    @settings(
        max_examples=fuzz_budget.examples(250),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(inputs(name))
    def fuzz(data: bytes) -> None:
        TARGETS[name](data)

    fuzz()


def test_every_target_has_a_corpus() -> None:
    assert all(SEEDS.values()), [name for name, seeds in SEEDS.items() if not seeds]
