"""Splitting a stream of chunks into lines."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddock.kit.errors import TooLargeError
from paddock.store.kubernetes.watching import LineSplitter

line = st.binary(max_size=40).filter(lambda data: b"\n" not in data and data != b"")


@given(st.lists(line, max_size=20), st.lists(st.integers(1, 30), min_size=1, max_size=60))
def test_any_split_into_chunks_gives_the_same_lines(lines: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(item + b"\n" for item in lines)
    splitter = LineSplitter()
    seen: list[bytes] = []
    position = 0
    while position < len(stream):
        size = cuts[position % len(cuts)]
        seen += splitter.feed(stream[position : position + size])
        position += size
    assert seen == lines


def test_an_incomplete_line_is_not_returned() -> None:
    splitter = LineSplitter()
    assert list(splitter.feed(b"whole\nhalf")) == [b"whole"]


def test_an_endless_line_is_rejected() -> None:
    splitter = LineSplitter(longest=100)
    assert list(splitter.feed(b"x" * 90)) == []
    with pytest.raises(TooLargeError, match="longer than 100 bytes"):
        list(splitter.feed(b"x" * 20))
