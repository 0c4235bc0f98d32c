"""Property tests of the protobuf wire format."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddock.wire import protobuf
from paddock.wire.protobuf import ProtobufError

pytestmark = pytest.mark.timeout(120)

UNSIGNED = st.integers(0, (1 << 64) - 1)
SIGNED = st.integers(-(1 << 63), (1 << 63) - 1)
NUMBERS = st.integers(1, protobuf.MAX_FIELD_NUMBER)
FIELDS = st.lists(st.tuples(NUMBERS, UNSIGNED | st.binary(max_size=300)), max_size=20)


@given(UNSIGNED)
def test_varints_round_trip(value: int) -> None:
    data = protobuf.encode_varint(value)

    assert protobuf.read_varint(data, 0) == (value, len(data))
    assert len(data) == max(1, -(-value.bit_length() // 7))


@given(SIGNED)
def test_signed_varints_round_trip(value: int) -> None:
    encoded, _ = protobuf.read_varint(protobuf.encode_varint(value), 0)

    assert protobuf.signed(encoded) == value


@given(UNSIGNED)
def test_a_varint_truncated_at_any_byte_is_refused(value: int) -> None:
    data = protobuf.encode_varint(value)

    for end in range(len(data)):
        with pytest.raises(ProtobufError):
            protobuf.read_varint(data[:end], 0)


@given(st.integers(0, (1 << 56) - 1), st.integers(1, 9))
def test_a_varint_padded_to_at_most_ten_bytes_is_read(value: int, padding: int) -> None:
    data = bytearray(protobuf.encode_varint(value))
    data[-1] |= 0x80
    padded = (bytes(data) + b"\x80" * padding)[:9] + b"\x00"

    assert protobuf.read_varint(padded, 0) == (value, len(padded))


@given(st.binary(min_size=9, max_size=9), st.integers(2, 255), st.binary(max_size=4))
def test_a_varint_over_64_bits_is_refused(start: bytes, tenth: int, rest: bytes) -> None:
    data = bytes(byte | 0x80 for byte in start) + bytes([tenth]) + rest

    with pytest.raises(ProtobufError):
        protobuf.read_varint(data, 0)


@given(FIELDS)
def test_messages_round_trip(fields: list[tuple[int, int | bytes]]) -> None:
    expected: protobuf.Message = {}
    for number, value in fields:
        expected.setdefault(number, []).append(value)

    assert protobuf.decode_message(protobuf.encode_message(fields)) == expected


@given(FIELDS)
def test_a_message_truncated_at_any_byte_is_shorter_or_refused(
    fields: list[tuple[int, int | bytes]],
) -> None:
    encoded = [protobuf.encode_message([field]) for field in fields]
    data = b"".join(encoded)
    ends = {sum(map(len, encoded[:count])): count for count in range(len(encoded) + 1)}

    for end in range(len(data) + 1):
        if end in ends:
            assert len(list(protobuf.read_fields(data[:end]))) == ends[end]
        else:
            with pytest.raises(ProtobufError):
                protobuf.decode_message(data[:end])


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_a_message_or_an_error(data: bytes) -> None:
    try:
        message = protobuf.decode_message(data)
    except ProtobufError:
        return
    assert all(0 < number <= protobuf.MAX_FIELD_NUMBER for number in message)


def test_text_is_encoded_as_utf_8() -> None:
    data = protobuf.encode_message([(1, "grün")])

    assert protobuf.decode_text(protobuf.get_bytes(protobuf.decode_message(data), 1)) == "grün"


def test_fixed_width_fields_are_read_as_bytes() -> None:
    data = protobuf.fixed64_field(1, b"8 bytes!") + b"\x15four"

    assert list(protobuf.read_fields(data)) == [
        (1, protobuf.FIXED64, b"8 bytes!"),
        (2, protobuf.FIXED32, b"four"),
    ]


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\x00\x01", id="field number 0"),
        pytest.param(protobuf.encode_varint(1 << 32) + b"\x01", id="field number too large"),
        pytest.param(b"\x0b\x0c", id="group"),
        pytest.param(b"\x0e\x01", id="unknown wire type"),
        pytest.param(b"\x09seven b", id="short fixed64"),
        pytest.param(b"\x0dabc", id="short fixed32"),
        pytest.param(b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", id="length of 2^64-1"),
    ],
)
def test_malformed_fields_are_refused(data: bytes) -> None:
    with pytest.raises(ProtobufError):
        protobuf.decode_message(data)


def test_the_last_value_of_a_field_counts() -> None:
    message = protobuf.decode_message(protobuf.encode_message([(1, 5), (1, -2), (2, b"x")]))

    assert protobuf.get_int(message, 1) == -2
    assert protobuf.get_int(message, 9) == 0
    assert protobuf.get_bytes(message, 9) == b""


def test_a_value_of_the_wrong_wire_type_is_refused() -> None:
    message = protobuf.decode_message(protobuf.encode_message([(1, 5), (2, b"x")]))

    with pytest.raises(ProtobufError, match="field 2 has the wrong wire type"):
        protobuf.get_int(message, 2)
    with pytest.raises(ProtobufError, match="field 1 has the wrong wire type"):
        protobuf.get_bytes(message, 1)
    with pytest.raises(ProtobufError, match="not UTF-8"):
        protobuf.decode_text(b"\xff")
