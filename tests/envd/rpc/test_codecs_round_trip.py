"""Property tests of codecs: envelopes, messages in protobuf and JSON, multipart, signatures."""

import base64
import contextlib
import gzip
import string
import struct
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paddock.envd.files.signature import BadSignatureError, sign, verify
from paddock.envd.http.multipart import (
    MultipartError,
    MultipartParser,
    PartData,
    PartEnd,
    PartStart,
)
from paddock.envd.rpc import messages as m
from paddock.envd.rpc import proto
from paddock.envd.rpc.connect_frames import (
    BinaryCodec,
    ConnectError,
    EnvelopeReader,
    JsonCodec,
    envelope,
)
from tests.envd.rig import open_rig

pytestmark = pytest.mark.timeout(120)

# No deadline: the machine may be busy.
relaxed = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
TYPES = sorted(m.FIELDS, key=lambda kind: kind.__name__)


def instances(kind: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    """Return a strategy for messages of a type, from its table and annotations."""
    hints = get_type_hints(kind)
    fields = {row.name: _values(row, hints[row.name]) for row in m.FIELDS[kind]}
    return st.fixed_dictionaries(fields).map(lambda values: kind(**values))


def _values(row: proto.Field, hint: Any) -> st.SearchStrategy[Any]:
    scalars: dict[str, st.SearchStrategy[Any]] = {
        "varint": st.integers(0, 2**32 - 1),
        "zigzag": st.integers(-(2**31), 2**31 - 1),
        "bool": st.booleans(),
        "string": TEXT,
        "bytes": st.binary(max_size=60),
        "map": st.dictionaries(TEXT, TEXT, max_size=3),
        "timestamp": st.datetimes(
            datetime(1, 1, 1),  # noqa: DTZ001 - hypothesis adds the zone
            datetime(9999, 12, 31),  # noqa: DTZ001 - likewise
            timezones=st.just(UTC),
        ),
    }
    if row.message is not None:
        one = instances(row.message)
    elif row.enum is not None:
        one = st.sampled_from(sorted(row.enum))
    else:
        one = scalars[row.kind]
    if row.repeated:
        return st.lists(one, max_size=3).map(tuple)
    return (
        st.none() | one
        if type(None) in get_args(hint) or (get_origin(hint) is None and row.optional)
        else one
    )


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.__name__)
@settings(relaxed, max_examples=40)
@given(data=st.data())
def test_every_message_round_trips_through_both_codecs(
    kind: type[msgspec.Struct], data: st.DataObject
) -> None:
    message = data.draw(instances(kind))

    for codec in (JsonCodec(), BinaryCodec()):
        assert codec.decode(codec.encode(message), kind) == message
    assert proto.from_json(JsonCodec().encode(message), kind, m.FIELDS) == message


@settings(relaxed, max_examples=300)
@given(kind=st.sampled_from(TYPES), data=st.binary(max_size=80))
def test_arbitrary_bytes_are_a_message_or_a_decode_error(
    kind: type[msgspec.Struct], data: bytes
) -> None:
    for decode in (BinaryCodec().decode, JsonCodec().decode):
        with contextlib.suppress(proto.DecodeError):
            assert isinstance(decode(data, kind), kind)


@settings(relaxed, max_examples=200)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
        lambda children: (
            st.lists(children, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ["process", "pid", "tag", "input", "stdin", "config", "envs", "args"]
                ),
                children,
                max_size=4,
            )
        ),
        max_leaves=8,
    )
)
def test_arbitrary_json_is_a_message_or_a_decode_error(value: Any) -> None:
    for kind in (m.StartRequest, m.SendInputRequest, m.WatchRequest, m.SendSignalRequest):
        with contextlib.suppress(proto.DecodeError):
            assert isinstance(JsonCodec().decode(msgspec.json.encode(value), kind), kind)


def test_unknown_fields_are_skipped_and_the_last_value_wins() -> None:
    data = b"\x0a\x01a" + b"\x78\x05" + b"\x81\x01" + b"8bytes!!" + b"\x0a\x01b"

    assert BinaryCodec().decode(data, m.PathRequest) == m.PathRequest(path="b")


def test_bytes_may_be_url_safe_and_unpadded() -> None:
    data = bytes(range(256))
    text = base64.urlsafe_b64encode(data).decode().rstrip("=")

    got = JsonCodec().decode(msgspec.json.encode({"stdin": text}), m.ProcessInput)

    assert got == m.ProcessInput(stdin=data)


def test_a_deeply_nested_message_is_refused() -> None:
    with pytest.raises(proto.DecodeError):
        proto.decode(b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", m.StartRequest, m.FIELDS)


@settings(relaxed)
@given(
    st.lists(st.tuples(st.integers(0, 255), st.binary(max_size=40)), max_size=8),
    st.lists(st.integers(1, 9), min_size=1),
)
def test_envelopes_are_read_however_the_stream_is_split(
    frames: list[tuple[int, bytes]], cuts: list[int]
) -> None:
    stream = b"".join(envelope(payload, flags) for flags, payload in frames)
    reader = EnvelopeReader()
    got: list[tuple[int, bytes]] = []
    position = turn = 0
    while position < len(stream):
        step = cuts[turn % len(cuts)]
        got += reader.feed(stream[position : position + step])
        position, turn = position + step, turn + 1

    assert got == frames
    assert reader.is_empty


def test_an_oversized_envelope_is_refused_before_it_is_buffered() -> None:
    with pytest.raises(ConnectError):
        EnvelopeReader(limit=10).feed(struct.pack(">BI", 0, 11))


_NAME = st.text(string.ascii_letters + string.digits + "/._- äß", min_size=1, max_size=20)
_PAYLOAD = st.lists(
    st.sampled_from([b"\r\n", b"--", b"\r\n--bound", b"\r\n--boundar", b"\r", b"\n", b"x" * 50])
    | st.binary(max_size=20),
    max_size=8,
).map(b"".join)


@settings(relaxed, max_examples=200)
@given(st.lists(st.tuples(_NAME, _PAYLOAD), max_size=4), st.lists(st.integers(1, 30), min_size=1))
def test_forms_are_read_however_the_body_is_split(
    parts: list[tuple[str, bytes]], cuts: list[int]
) -> None:
    parts = [(n, d) for n, d in parts if b"\r\n--boundary" not in b"\r\n" + d]
    body = b"preamble"
    for name, data in parts:
        head = f'\r\n--boundary \r\nContent-Disposition: form-data; name="file"; filename="{name}"'
        body += head.encode() + b"\r\n\r\n" + data
    body += b"\r\n--boundary--\r\nepilogue"
    parser = MultipartParser("boundary")
    got: list[tuple[str | None, bytes]] = []
    position = turn = 0
    while position < len(body):
        step = cuts[turn % len(cuts)]
        for event in parser.feed(body[position : position + step]):
            if isinstance(event, PartStart):
                assert event.name == "file"
                got.append((event.filename, b""))
            elif isinstance(event, PartData):
                got[-1] = (got[-1][0], got[-1][1] + event.data)
            else:
                assert isinstance(event, PartEnd)
        position, turn = position + step, turn + 1

    assert got == parts
    assert parser.is_complete


@settings(relaxed, max_examples=200)
@given(st.binary(max_size=200))
def test_an_arbitrary_body_is_a_form_or_an_error(body: bytes) -> None:
    parser = MultipartParser("b")
    with contextlib.suppress(MultipartError):
        parser.feed(b"--b\r\n" + body)


@settings(relaxed)
@given(TEXT, TEXT, st.text(min_size=1, max_size=9), st.none() | st.integers(0, 2**33), TEXT)
def test_a_signature_is_valid_only_for_what_was_signed(
    path: str, username: str, token: str, expires: int | None, other: str
) -> None:
    expiration = None if expires is None else str(expires)
    made = sign(path=path, operation="read", username=username, token=token, expiration=expiration)
    known: dict[str, Any] = {
        "signature": made, "path": path, "operation": "read", "username": username,
        "token": token, "expiration": expiration, "now": float(expires or 0),
    }  # fmt: skip

    verify(**known)
    changes = [{"operation": "write"}, {"path": path + other + "x"}, {"token": token + "x"}]
    if expires is not None:
        changes += [{"now": expires + 1.0}, {"expiration": None}]
    for change in changes:
        with pytest.raises(BadSignatureError):
            verify(**{**known, **change})


def test_a_signature_matches_the_documented_algorithm() -> None:
    """The expected value is computed as in the documentation of the clients."""
    import hashlib

    digest = hashlib.sha256(b"/home/user/a:read:user:tok:1700000000").digest()
    wanted = "v1_" + base64.b64encode(digest).decode().replace("=", "")

    assert wanted == sign(
        path="/home/user/a", operation="read", username="user", token="tok", expiration="1700000000"
    )


async def test_binary_and_json_clients_are_served_alike(tmp_path: Path) -> None:
    rig = await open_rig(tmp_path)
    codec = BinaryCodec()

    async def unary(method: str, message: msgspec.Struct, answer: type[msgspec.Struct]) -> Any:
        got = await rig.request(
            "POST", f"/{method}", codec.encode(message), content_type="application/proto"
        )
        assert (got.status, got.headers["content-type"]) == (200, "application/proto"), got
        return codec.decode(got.body, answer)

    made = await unary("filesystem.Filesystem/MakeDir", m.PathRequest(path="d"), m.EntryResponse)
    listed = await unary("filesystem.Filesystem/ListDir", m.ListDirRequest(), m.ListDirResponse)
    refused = await rig.request(
        "POST",
        "/filesystem.Filesystem/Stat",
        codec.encode(m.PathRequest(path="nothing")),
        content_type="application/proto",
    )
    start = m.StartRequest(process=m.ProcessConfig(cmd="/bin/sh", args=("-c", "echo hi; exit 3")))
    streamed = await rig.request(
        "POST",
        "/process.Process/Start",
        envelope(gzip.compress(codec.encode(start)), 1),
        content_type="application/connect+proto",
        connect_content_encoding="gzip",
    )
    rig.envd.close()

    assert made.entry.name == "d"
    assert listed.entries == (made.entry,)
    assert refused.json()["code"] == "not_found"
    *frames, (flags, last) = EnvelopeReader().feed(streamed.body)
    events = [codec.decode(data, m.ProcessEventResponse).event for _, data in frames]
    assert (flags, last) == (2, b"{}")
    assert events[0].start.pid > 0
    assert events[1].data.stdout == b"hi\n"
    assert events[2].end.exit_code == 3


async def test_unary_calls_accept_gzip_and_refuse_unknown_encodings(tmp_path: Path) -> None:
    rig = await open_rig(tmp_path)

    async def code(body: bytes, encoding: str) -> Any:
        answer = await rig.request(
            "POST",
            "/process.Process/List",
            body,
            content_type="application/json",
            content_encoding=encoding,
        )
        return answer.json().get("code", answer.status)

    assert await code(gzip.compress(b"{}"), "gzip") == 200
    assert await code(b"{}", "identity") == 200
    assert await code(gzip.compress(b"{}")[:-5], "gzip") == "invalid_argument"
    assert await code(b"{}", "br") == "unimplemented"
    bomb = gzip.compress(b" " * (65 << 20), 1)
    assert await code(bomb, "gzip") == "resource_exhausted"
    rig.envd.close()
