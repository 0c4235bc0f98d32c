"""Heads and chunked bodies: parsed unambiguously, or refused."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddock.gateway.http.bodies import BadBody, ChunkedReader, chunk, last_chunk
from paddock.gateway.http.request_heads import BadHead, read_request
from paddock.gateway.http.request_rewrite import write_request
from paddock.gateway.http.response_heads import read_response

HOST = b"Host: a\r\n"


def head(*lines: bytes, first: bytes = b"POST / HTTP/1.1") -> bytes:
    return b"\r\n".join((first, b"Host: a", *lines, b""))


@pytest.mark.parametrize(
    "block",
    [
        head(b"Content-Length: 5", b"Transfer-Encoding: chunked"),
        head(b"Content-Length: 5", b"Content-Length: 5"),
        head(b"Content-Length: 5, 5"),
        head(b"Content-Length: +5"),
        head(b"Content-Length: 0x5"),
        head(b"Content-Length: 5 5"),
        head(b"Content-Length: "),
        head(b"Content-Length: 99999999999999999999"),
        head(b"Content-Length : 5"),
        head(b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked"),
        head(b"Transfer-Encoding: chunked, chunked"),
        head(b"Transfer-Encoding: identity"),
        head(b"Transfer-Encoding: xchunked"),
        head(b"Transfer-Encoding: gzip, chunked"),
        head(b"Transfer-Encoding:\x0bchunked"),
        head(b"Transfer-Encoding : chunked"),
        head(b" Transfer-Encoding: chunked"),
        head(b"X: y", b" folded: z"),
        head(b"X: y\nTransfer-Encoding: chunked"),
        head(b"X: y\rZ: a"),
        head(b"X: \x00"),
        head(b"no colon here"),
        head(b": no name"),
        head(b"Transfer-Encoding: chunked", first=b"POST / HTTP/1.0"),
        head(first=b"POST  / HTTP/1.1"),
        head(first=b"POST / HTTP/1.1 "),
        head(first=b"POST / HTTP/1.2"),
        head(first=b"POST / http/1.1"),
        head(first=b"POST /\tHTTP/1.1"),
        head(first=b"post / HTTP/1.1"),
        head(first=b"P0ST / HTTP/1.1"),
        head(first=b"POST /#x HTTP/1.1"),
        head(first=b" POST / HTTP/1.1"),
        b"POST / HTTP/1.1\nHost: a\r\n",
        b"POST /\r\n",
    ],
)
def test_ambiguous_heads_are_refused(block: bytes) -> None:
    with pytest.raises(BadHead):
        read_request(block)


def test_an_absolute_target_sets_the_host() -> None:
    read = read_request(b"GET http://b:1/x?y HTTP/1.1\r\nHost: a\r\n")
    assert (read.host, read.target) == ("b:1", "/x?y")
    assert read_request(b"GET http://b HTTP/1.1\r\nHost: a\r\n").target == "/"


names = st.from_regex(rb"[A-Za-z0-9!#$%&'*+.^`|~-]{1,20}", fullmatch=True)
values = st.from_regex(rb"[!-~\x80-\xff]([\t -~\x80-\xff]{0,40}[!-~\x80-\xff])?", fullmatch=True)


@given(st.lists(st.tuples(names, values), max_size=20))
def test_end_to_end_header_lines_are_forwarded_unchanged(lines) -> None:
    ours = {b"host", b"connection", b"upgrade", b"content-length", b"transfer-encoding", b"te",
            b"trailer", b"expect", b"forwarded", b"keep-alive"}  # fmt: skip
    lines = [(name, value) for name, value in lines if name.lower() not in ours]
    raw = [name + b": " + value for name, value in lines]
    read = read_request(head(*raw))
    written = write_request(
        read, target="/t", host="h", client="1.2.3.4", scheme="http", trusted=False
    )
    assert written.startswith(b"POST /t HTTP/1.1\r\nHost: h\r\n")
    for line in raw:
        assert b"\r\n" + line + b"\r\n" in written
    # The written head parses to the same content.
    assert len(read_request(written[:-2]).lines) >= len(raw)


@given(st.binary(max_size=300))
def test_no_bytes_break_the_head_parser(data: bytes) -> None:
    for block in (data, b"GET / HTTP/1.1\r\nHost: a\r\n" + data):
        with contextlib.suppress(BadHead):
            assert b"\r\n\r\n" not in b"".join(read_request(block).lines)
        with contextlib.suppress(BadHead):
            read = read_response(b"HTTP/1.1 200 OK\r\n" + data, method="GET")
            assert b"\r\n\r\n" not in b"".join(read.lines)


def feed(reader: ChunkedReader, data: bytes, cuts: list[int]) -> tuple[bytes, bool]:
    body, done, at = b"", False, 0
    for cut in sorted({min(cut, len(data)) for cut in cuts} | {len(data)}):
        if done:
            reader.rest += data[at:cut]
        else:
            pieces, done = reader.feed(data[at:cut])
            body += b"".join(pieces)
        at = cut
    return body, done


@given(
    st.lists(st.binary(min_size=1, max_size=50), max_size=8),
    st.lists(st.integers(0, 500), max_size=20),
    st.binary(max_size=20),
)
def test_a_chunked_body_is_the_same_however_it_is_split(pieces, cuts, rest) -> None:
    data = b"".join(map(chunk, pieces)) + last_chunk([b"X-T: 1\r\n"]) + rest
    reader = ChunkedReader()
    body, done = feed(reader, data, cuts)
    assert done
    assert body == b"".join(pieces)
    assert reader.trailers == [b"X-T: 1\r\n"]
    assert reader.rest == rest


@pytest.mark.parametrize(
    "data",
    [
        b"x\r\n",
        b"-1\r\n",
        b"+1\r\nx\r\n",
        b"0x1\r\nx\r\n",
        b"1 \r\nx\r\n",
        b" 1\r\nx\r\n",
        b"1\nx\n",
        b"1\r\nxy\r\n",
        b"1\r\nx\n0\r\n\r\n",
        b"\r\n",
        b"1;\x00\r\nx\r\n",
        b"ffffffffffffffff\r\n",
        b"1;" + b"e" * 2000,
        b"0\r\nbad trailer\r\n\r\n",
        b"0\r\n: x\r\n\r\n",
        b"0\r\nX: " + b"y" * 20_000,
    ],
)
@pytest.mark.parametrize("is_cut", [False, True])
def test_ambiguous_chunks_are_refused(data: bytes, is_cut: bool) -> None:
    with pytest.raises(BadBody):
        feed(ChunkedReader(), data, list(range(len(data))) if is_cut else [])


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=10))
def test_no_bytes_break_the_chunk_parser_and_splits_do_not_matter(data, cuts) -> None:
    results = []
    for places in ([], cuts):
        reader = ChunkedReader()
        try:
            results.append((*feed(reader, data, places), reader.rest, reader.trailers))
        except BadBody:
            results.append(None)
    whole, cut = results
    assert (whole is None) == (cut is None)
    assert whole == cut
