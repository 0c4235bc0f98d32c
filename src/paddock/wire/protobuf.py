"""The protobuf wire format: varints, tags and fields, with bounds checks.

Message layouts stay with their owners: `envd/rpc/proto.py` (Connect), `envd/tasks/cri_wire.py`
(CRI), `runtime/local/checkpoint/criu.py` (CRIU), `api/kube/body/protobuf.py` and
`api/kube/openapi/protobuf.py` (Kubernetes). Malformed input raises `ProtobufError`. Groups, which
proto3 does not have, are refused.
"""

from collections.abc import Iterable, Iterator

VARINT, FIXED64, LEN, FIXED32 = 0, 1, 2, 5
"""Wire types, named as in the protobuf documentation."""

MAX_FIELD_NUMBER = (1 << 29) - 1
_MASK64 = (1 << 64) - 1
_LAST_SHIFT = 63
"""The tenth byte of a varint holds only bit 63."""

Message = dict[int, list[int | bytes]]
"""One level of a message: the values of each field number, in order of appearance."""


class ProtobufError(ValueError):
    """The bytes are not a protobuf message of the expected layout."""


# -- writing -----------------------------------------------------------------------------------


def encode_varint(value: int) -> bytes:
    """Encode a number; a negative one as its 64-bit two's complement, as int32 and int64 are."""
    value &= _MASK64
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def varint_field(number: int, value: int) -> bytes:
    """Encode an integer, boolean or enum field."""
    return encode_varint(number << 3 | VARINT) + encode_varint(value)


def len_field(number: int, data: bytes) -> bytes:
    """Encode a length-delimited field: bytes, text in UTF-8, or an encoded message."""
    return encode_varint(number << 3 | LEN) + encode_varint(len(data)) + data


def fixed64_field(number: int, data: bytes) -> bytes:
    """Encode a field of eight bytes, such as a double."""
    return encode_varint(number << 3 | FIXED64) + data


def encode_message(fields: Iterable[tuple[int, int | bytes | str]]) -> bytes:
    """Encode fields in the given order; a field number may repeat."""
    out = bytearray()
    for number, value in fields:
        if isinstance(value, int):
            out += varint_field(number, value)
        else:
            out += len_field(number, value.encode() if isinstance(value, str) else value)
    return bytes(out)


# -- reading -----------------------------------------------------------------------------------


def read_varint(data: bytes | memoryview, position: int) -> tuple[int, int]:
    """Return the unsigned number at a position, and the position after it."""
    value = shift = 0
    while position < len(data):
        byte = data[position]
        position += 1
        if shift == _LAST_SHIFT and byte > 1:
            break
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise ProtobufError("truncated or oversized varint")


def read_fields(data: bytes | memoryview) -> Iterator[tuple[int, int, int | memoryview]]:
    """Yield field number, wire type and value of each field; only varints are integers."""
    view = memoryview(data)
    position = 0
    while position < len(view):
        tag, position = read_varint(view, position)
        number, wire_type = tag >> 3, tag & 7
        if not 0 < number <= MAX_FIELD_NUMBER:
            raise ProtobufError(f"invalid field number {number}")
        if wire_type == VARINT:
            value, position = read_varint(view, position)
            yield number, wire_type, value
            continue
        if wire_type == LEN:
            length, position = read_varint(view, position)
        elif wire_type in (FIXED64, FIXED32):
            length = 8 if wire_type == FIXED64 else 4
        else:
            raise ProtobufError(f"unsupported wire type {wire_type}")
        if length > len(view) - position:
            raise ProtobufError("truncated field")
        yield number, wire_type, view[position : position + length]
        position += length


def decode_message(data: bytes | memoryview) -> Message:
    """Decode one level of a message; nested messages stay bytes."""
    message: Message = {}
    for number, _, value in read_fields(data):
        message.setdefault(number, []).append(value if isinstance(value, int) else bytes(value))
    return message


def get_int(message: Message, number: int) -> int:
    """Return the last value of a signed integer field, or 0."""
    value = message[number][-1] if number in message else 0
    if not isinstance(value, int):
        raise ProtobufError(f"field {number} has the wrong wire type")
    return signed(value)


def get_bytes(message: Message, number: int) -> bytes:
    """Return the last value of a length-delimited field, or no bytes."""
    value = message[number][-1] if number in message else b""
    if isinstance(value, int):
        raise ProtobufError(f"field {number} has the wrong wire type")
    return value


def signed(value: int) -> int:
    """Return a varint's value as the two's complement that int32 and int64 use."""
    return value - (1 << 64) if value >= 1 << 63 else value


def decode_text(data: bytes | memoryview) -> str:
    """Decode the value of a string field."""
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise ProtobufError("string field is not UTF-8") from error
