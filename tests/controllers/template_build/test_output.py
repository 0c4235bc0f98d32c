"""Output of commands in the log."""

from paddock.controllers.template_build.output import MAX_LINE_BYTES, OutputLines


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
