"""Signed URLs for `/files`: the signature clients compute from path, user and token.

No I/O. Comparisons take constant time.
"""

import base64
import hashlib
import hmac
from typing import Literal

Operation = Literal["read", "write"]


class BadSignatureError(Exception):
    """The signature is invalid or expired; the message does not contain the expected one."""


def sign(
    *, path: str, operation: Operation, username: str, token: str, expiration: str | None = None
) -> str:
    """Return the signature of one operation on one path."""
    parts = [path, operation, username, token]
    if expiration is not None:
        parts.append(expiration)
    digest = hashlib.sha256(":".join(parts).encode("utf-8", "surrogateescape")).digest()
    return "v1_" + base64.b64encode(digest).decode().rstrip("=")


def verify(
    *,
    signature: str,
    path: str,
    operation: Operation,
    username: str,
    token: str,
    expiration: str | None,
    now: float,
) -> None:
    """Raise `BadSignatureError` unless the signature is valid and not expired."""
    expected = sign(
        path=path, operation=operation, username=username, token=token, expiration=expiration
    )
    given = signature.encode("utf-8", "surrogateescape")
    if not hmac.compare_digest(given, expected.encode()):
        raise BadSignatureError("invalid signature")
    if expiration is not None:
        if not (expiration.isascii() and expiration.isdigit() and len(expiration) < 20):
            raise BadSignatureError("signature_expiration is not a time in seconds")
        if int(expiration) < now:
            raise BadSignatureError("signature is already expired")


def is_token(given: str | None, expected: str) -> bool:
    """Whether the given token is the expected one."""
    return given is not None and hmac.compare_digest(
        given.encode("utf-8", "surrogateescape"), expected.encode("utf-8", "surrogateescape")
    )
