"""Fuzz targets: each takes any bytes and may raise only the documented errors of its parser.

A target also asserts the invariants of accepted input. Interesting inputs are in
`corpus/<target>/`; `test_parsers.py` replays them and splices them into new ones.
"""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

from paddock.api.kube.body.patches import json_patch, merge_patch, strategic_patch
from paddock.envd.files import signature
from paddock.envd.http import multipart
from paddock.envd.rpc import connect_frames as frames
from paddock.gateway.http import request_heads, request_rewrite, response_heads
from paddock.gateway.routing import addressing
from paddock.kit.errors import InvalidError, PaddockError
from paddock.resources.selectors import parse_fields, parse_labels

CORPUS = Path(__file__).parent / "corpus"
BOUNDARY = "xyz"


def text(data: bytes) -> str:
    """Return any bytes as the text of a header."""
    return data.decode("latin-1")


def label_selector(data: bytes) -> None:
    try:
        selector = parse_labels(text(data))
    except InvalidError:
        return
    assert parse_labels(str(selector)) == selector


def field_selector(data: bytes) -> None:
    try:
        selector = parse_fields(text(data))
    except InvalidError:
        return
    assert parse_fields(str(selector)) == selector


def patches(data: bytes) -> None:
    """Two JSON documents, one per line: a target and a patch of any type."""
    first, _, second = data.partition(b"\n")
    try:
        target, patch = json.loads(first), json.loads(second)
    except (ValueError, RecursionError):
        return
    before = json.dumps(target)
    merged = merge_patch(target, patch)
    assert json.dumps(target) == before, "a merge patch changed what it was given"
    assert merge_patch(merged, patch) == merged, "a merge patch twice is not the same as once"
    for change in (json_patch, strategic_patch):
        with contextlib.suppress(PaddockError):
            change(target, patch)
        assert json.dumps(target) == before, f"{change.__name__} changed what it was given"


def request_head(data: bytes) -> None:
    try:
        head = request_heads.read_request(data)
    except request_heads.BadHead as problem:
        # HTTP requires 501 for an unknown transfer coding.
        is_theirs = 400 <= problem.status < 500 or problem.status == 501
        assert is_theirs, problem  # noqa: PT017 - not about an exception of a test
        return
    written = request_rewrite.write_request(
        head, target=head.target, host="inside", client="10.0.0.1", scheme="http", trusted=False
    )
    block, end, rest = written.partition(b"\r\n\r\n")
    assert end, "a head that was written does not end"
    assert not rest, "a head that was written has something behind its end"
    again = request_heads.read_request(block + b"\r\n")
    assert again.method == head.method
    assert again.target == head.target
    assert again.framing == head.framing, "the sandbox would see another body than we did"
    address(
        "\n".join((head.method, head.target, head.host, head.sandbox or "", head.port or ""))
        .encode("latin-1", "replace")
    )  # fmt: skip


def response_head(data: bytes) -> None:
    try:
        head = response_heads.read_response(data, method="GET")
    except request_heads.BadHead as problem:
        assert problem.status == 502  # noqa: PT017 - not about an exception of a test
        return
    written = response_heads.write_response(head, keep_alive=True, is_http_1_1=True)
    _, end, rest = written.partition(b"\r\n\r\n")
    assert end, "a head that was written does not end"
    assert not rest, "a head that was written has something behind its end"


def address(data: bytes) -> None:
    """Lines: method, target, host, sandbox header, port header, ingress header."""
    method, target, host, sandbox, port, ingress, *_ = [*text(data).split("\n"), *[""] * 6]
    found = addressing.parse(
        method=method,
        target=target,
        host=host,
        sandbox_header=sandbox or None,
        port_header=port or None,
        ingress_header=ingress or None,
    )
    if isinstance(found, addressing.Destination):
        assert 0 < found.port < 65536
        assert found.sandbox_id == found.sandbox_id.lower()
        assert found.sandbox_id.isalnum()
        assert "\r" not in found.target or "\r" in target


def signed_url(data: bytes) -> None:
    """Lines: path, user, token, expiration. Only the signed URL verifies."""
    path, user, token, expiration, *_ = [*text(data).split("\n"), *[""] * 4]
    given = {"path": path, "operation": "read", "username": user, "token": token}
    made = signature.sign(**given, expiration=expiration or None)  # pyright: ignore[reportArgumentType]
    for wrong in (made[:-1], made + "A", "", text(data)):
        if wrong == made:
            continue
        try:
            signature.verify(signature=wrong, **given, expiration=expiration or None, now=0)  # pyright: ignore[reportArgumentType]
        except signature.BadSignatureError:
            continue
        raise AssertionError(f"a wrong signature was taken: {wrong!r}")
    try:
        signature.verify(signature=made, **given, expiration=expiration or None, now=0)  # pyright: ignore[reportArgumentType]
    except signature.BadSignatureError:
        assert not expiration.isdigit() or not expiration.isascii() or len(expiration) > 19


def connect_frames(data: bytes) -> None:
    """The same envelopes, however the stream is split; limits are enforced."""
    whole, cut = frames.EnvelopeReader(limit=1000), frames.EnvelopeReader(limit=1000)
    outcomes: list[object] = []
    for reader, pieces in ((whole, [data]), (cut, [data[i : i + 1] for i in range(len(data))])):
        found: list[tuple[int, bytes]] = []
        try:
            for piece in pieces:
                found += reader.feed(piece)
        except frames.ConnectError as error:
            outcomes.append(error.code)
            continue
        outcomes.append(found)
        assert all(len(message) <= 1000 for _, message in found)
        for flags, message in found:
            assert frames.EnvelopeReader().feed(frames.envelope(message, flags)) == [
                (flags, message)
            ]
    assert outcomes[0] == outcomes[1]
    with contextlib.suppress(frames.ConnectError):
        assert len(frames.inflate(data, 1000)) <= 1000


def form(data: bytes) -> None:
    """The same parts, however the body is split."""

    def parts(pieces: list[bytes]) -> object:
        parser = multipart.MultipartParser(BOUNDARY)
        events: list[object] = []
        try:
            for piece in pieces:
                for event in parser.feed(piece):
                    if isinstance(event, multipart.PartData) and events:
                        if isinstance(events[-1], bytes):
                            events[-1] += event.data
                            continue
                        event = event.data
                    events.append(event)
        except multipart.MultipartError:
            return "refused"
        return parser.is_complete, [item for item in events if item != b""]

    whole = parts([data])
    assert parts([data[i : i + 1] for i in range(len(data))]) == whole
    assert parts([data[i : i + 7] for i in range(0, len(data), 7)]) == whole
    multipart.parameters(text(data))


TARGETS: dict[str, Callable[[bytes], None]] = {
    "label_selector": label_selector,
    "field_selector": field_selector,
    "patches": patches,
    "request_head": request_head,
    "response_head": response_head,
    "address": address,
    "signed_url": signed_url,
    "connect_frames": connect_frames,
    "form": form,
}
