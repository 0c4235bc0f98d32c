"""Output of commands in the log."""

import asyncio

import pytest

from paddock.controllers.template_build.output import (
    BURST_BYTES,
    BYTES_PER_SECOND,
    MAX_LINE_BYTES,
    OutputLines,
    OutputPace,
)


def lines(*pieces: tuple[str, bytes]) -> list[str]:
    written: list[str] = []
    output = OutputLines("builder 1/2", written.append)
    for stream, data in pieces:
        output.feed(stream, data)
    output.end()
    return written


def test_pieces_become_lines_of_their_stream() -> None:
    found = lines(("stdout", b"a\nb"), ("stderr", b"x\n"), ("stdout", b"c\r\nlast"))
    assert found == [
        "[builder 1/2] [stdout]: a",
        "[builder 1/2] [stderr]: x",
        "[builder 1/2] [stdout]: bc",
        "[builder 1/2] [stdout]: last",
    ]


def test_a_line_without_end_is_cut_and_not_kept_in_memory() -> None:
    found = lines(("stdout", b"x" * (2 * MAX_LINE_BYTES + 5)))
    assert [len(line) - len("[builder 1/2] [stdout]: ") for line in found] == [
        MAX_LINE_BYTES,
        MAX_LINE_BYTES,
        5,
    ]


def test_bytes_that_are_no_text_are_replaced() -> None:
    assert lines(("stdout", b"\xff\n")) == ["[builder 1/2] [stdout]: \ufffd"]


@pytest.mark.looptime
async def test_output_without_end_is_read_at_a_bounded_rate_and_the_log_says_so_once() -> None:
    warnings: list[str] = []
    pace, loop = OutputPace(warnings.append), asyncio.get_running_loop()
    began = loop.time()
    await pace.take(BURST_BYTES)
    assert (loop.time() - began, warnings) == (0, [])
    for _ in range(10):
        await pace.take(BYTES_PER_SECOND)
    assert loop.time() - began == pytest.approx(10)
    assert len(warnings) == 1
    assert "more than 2 MiB per second" in warnings[0]
