"""CRI messages as mappings from field number to value, on top of `wire/protobuf.py`.

A message to send maps a field number to a value; a message received maps it to a list of values.
CRI needs strings, messages, booleans, integers and maps of strings only.
"""

import contextlib
from collections.abc import Generator, Mapping, Sequence
from typing import Any, cast

from paddock.wire import protobuf
from paddock.wire.protobuf import Message, ProtobufError


class CriError(Exception):
    """The container runtime returned an error, a malformed message, or nothing."""

    def __init__(self, message: str, *, is_gone: bool = False) -> None:
        super().__init__(message)
        self.is_gone = is_gone
        """Whether the runtime reports that the object does not exist."""


def encode(fields: Mapping[int, Any]) -> bytes:
    """Encode a message; lists are repeated fields, empty values are left out."""
    out = bytearray()
    for number, value in fields.items():
        if isinstance(value, (list, tuple)):
            for item in cast("Sequence[Any]", value):
                out += _encode_field(number, item)
        elif value is not None and value != "":
            out += _encode_field(number, value)
    return bytes(out)


def _encode_field(number: int, value: Any) -> bytes:
    if isinstance(value, int):
        return protobuf.varint_field(number, value) if value else b""
    if isinstance(value, str):
        data = value.encode()
    elif isinstance(value, Mapping):
        data = encode(cast("Mapping[int, Any]", value))
    else:
        data = bytes(value)
    return protobuf.len_field(number, data)


def map_entries(values: Mapping[str, str]) -> list[Mapping[int, str]]:
    """Return a map of strings as the repeated entries that it is on the wire."""
    return [{1: key, 2: value} for key, value in values.items()]


@contextlib.contextmanager
def _as_cri_error() -> Generator[None]:
    try:
        yield
    except ProtobufError as error:
        raise CriError(f"malformed message from the container runtime: {error}") from error


def decode(data: bytes) -> Message:
    """Decode one level of a message; nested messages stay bytes."""
    with _as_cri_error():
        return protobuf.decode_message(data)


def get_message(message: Message, number: int) -> Message:
    """Return the last value of a message field, or an empty message."""
    with _as_cri_error():
        return protobuf.decode_message(protobuf.get_bytes(message, number))


def get_messages(message: Message, number: int) -> list[Message]:
    """Return all values of a repeated message field."""
    return [get_message({number: [item]}, number) for item in message.get(number, ())]


def get_text(message: Message, number: int) -> str:
    """Return the last value of a string field, or an empty string."""
    with _as_cri_error():
        return protobuf.decode_text(protobuf.get_bytes(message, number))


def get_int(message: Message, number: int) -> int:
    """Return the last value of an integer field, or 0."""
    with _as_cri_error():
        return protobuf.get_int(message, number)
