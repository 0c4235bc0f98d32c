"""Identifiers and secrets, from the system's random number generator."""

import re
import secrets
import string
import uuid
from datetime import UTC, datetime

_ALPHABET = string.ascii_lowercase + string.digits
_NAME_ALPHABET = "bcdfghjklmnpqrstvwxz2456789"
"""As in Kubernetes: no vowels, so that a generated name never spells a word."""

_LETTERS = bytes(ord(_ALPHABET[number % len(_ALPHABET)]) for number in range(256))
"""Maps any byte to a letter of the alphabet; the slight bias costs less than one bit."""


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

_CHECKPOINT_ID = re.compile(r"^(?:snap|layer)(?:i[a-z0-9]{20}|[0-9a-f]{32})$", re.IGNORECASE)
"""Random, or the UID of an object without dashes."""


def uid() -> str:
    """Return a new object uid."""
    return str(uuid.uuid4())


def ordered_uid(now: datetime) -> str:
    """Return a new uid (UUIDv7) that is greater than those of earlier milliseconds.

    Objects with such names are in order although their creation times are whole seconds. Within a
    millisecond, the next bits are the fraction of it, to a quarter of a microsecond.
    """
    since = now - _EPOCH
    microseconds = (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds
    milliseconds, rest = divmod(microseconds, 1000)
    value = milliseconds << 80 | 7 << 76 | (rest << 12) // 1000 << 64
    return str(uuid.UUID(int=value | 0b10 << 62 | secrets.randbits(62)))


def sandbox_id() -> str:
    """Return a new sandbox id: `i` and 20 of `[a-z0-9]`; no dash, since host names split on it."""
    # A batch makes thousands at once: one read of the generator each, not twenty.
    return "i" + secrets.token_bytes(20).translate(_LETTERS).decode()


def checkpoint_id(kind: str) -> str:
    """Return a new public id of a checkpoint: its kind, `snap` or `layer`, and random letters."""
    return kind + sandbox_id()


def is_checkpoint_id(text: str) -> bool:
    """Whether a text has the form of the public id of a checkpoint."""
    return _CHECKPOINT_ID.match(text) is not None


def name_suffix(length: int = 5) -> str:
    """Return the random suffix of a generated name."""
    return "".join(secrets.choice(_NAME_ALPHABET) for _ in range(length))


def request_id() -> str:
    """Return an id for one request or one reconcile."""
    return secrets.token_hex(16)


def token(size_bytes: int = 32) -> str:
    """Return a new secret, as hex."""
    return secrets.token_hex(size_bytes)


def api_key() -> str:
    """Return a new API key in the form that E2B's clients accept."""
    return "e2b_" + secrets.token_hex(20)
