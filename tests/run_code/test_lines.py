"""Lines are split with bounded memory, wherever the pieces of the stream end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddock.run_code.lines import BoundedLines


@given(st.lists(st.binary(max_size=20).map(lambda data: data.replace(b"\n", b"")), max_size=8))
def test_any_pieces_give_the_same_lines(lines: list[bytes]) -> None:
    stream = b"".join(line + b"\n" for line in lines)
    for size in (1, 3, 1000):
        splitter = BoundedLines(100)
        pieces = [stream[start : start + size] for start in range(0, len(stream), size)]
        found = [line for piece in pieces for line in splitter.feed(piece)]
        assert found == [line for line in lines if line]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_of_a_long_line_only_the_length_is_kept(size: int) -> None:
    stream = b"a" * 50 + b"\nshort\n" + b"b" * 11 + b"\n"
    splitter = BoundedLines(10)
    pieces = [stream[start : start + size] for start in range(0, len(stream), size)]
    assert [line for piece in pieces for line in splitter.feed(piece)] == [50, b"short", 11]


def test_a_line_without_an_end_needs_no_more_memory_than_the_limit() -> None:
    splitter = BoundedLines(1000)
    for _ in range(1000):
        assert list(splitter.feed(b"x" * 500)) == []
        assert sum(map(len, splitter._parts)) <= 1000
    assert list(splitter.feed(b"\n")) == [500_000]
