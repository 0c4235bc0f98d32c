"""Versions and continue tokens as text: what clients carry from one call to the next."""

import base64
import binascii

import msgspec

from paddock.kit.errors import FieldProblem, InvalidError
from paddock.resources.meta import Key

_decoder = msgspec.json.Decoder(tuple[int, str, str])


def encode_token(version: int, last: Key | None) -> str:
    """Write where a list goes on: the version it is of, and the last key given."""
    key = last or Key("", "")
    data = msgspec.json.encode((version, key.namespace, key.name))
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def decode_token(token: str) -> tuple[int, Key]:
    """Read where a list goes on."""
    try:
        data = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))
        version, namespace, name = _decoder.decode(data)
    except (binascii.Error, ValueError, msgspec.DecodeError) as error:
        problem = FieldProblem("continue", "is not a token that a list gave")
        raise InvalidError(str(problem), problems=[problem]) from error
    return version, Key(namespace, name)


def parse_version(text: str) -> int:
    """Read a version; it is a number, whatever clients may think of it."""
    if not (text.isascii() and text.isdigit()) or len(text) > 20:
        problem = FieldProblem("resourceVersion", f"{text[:40]!r} is not a version")
        raise InvalidError(str(problem), problems=[problem])
    return int(text)
