"""Encoding of resource versions and continue tokens as text."""

import base64
import binascii

import msgspec

from paddock.kit.errors import FieldProblem, InvalidError
from paddock.resources.meta import Key

_decoder = msgspec.json.Decoder(tuple[int, str, str])


def encode_token(version: int, last: Key | None) -> str:
    """Return the continue token for a list at this version, after this key."""
    key = last or Key("", "")
    data = msgspec.json.encode((version, key.namespace, key.name))
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def decode_token(token: str) -> tuple[int, Key]:
    """Return the version and the last key of a continue token; `InvalidError` if malformed."""
    try:
        data = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))
        version, namespace, name = _decoder.decode(data)
    except (binascii.Error, ValueError, msgspec.DecodeError) as error:
        problem = FieldProblem("continue", "is not a continue token of a list")
        raise InvalidError(str(problem), problems=[problem]) from error
    return version, Key(namespace, name)


def parse_version(text: str) -> int:
    """Return the version as a number; `InvalidError` if it is not one."""
    if not (text.isascii() and text.isdigit()) or len(text) > 20:
        problem = FieldProblem("resourceVersion", f"{text[:40]!r} is not a version")
        raise InvalidError(str(problem), problems=[problem])
    return int(text)
