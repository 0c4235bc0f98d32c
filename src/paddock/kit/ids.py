"""Identifiers and secrets. Random ones come from the system's generator."""

import secrets
import string
import uuid

_ALPHABET = string.ascii_lowercase + string.digits
_NAME_ALPHABET = "bcdfghjklmnpqrstvwxz2456789"
"""As Kubernetes: no vowels, so that a generated name never spells a word."""

_LETTERS = bytes(ord(_ALPHABET[number % len(_ALPHABET)]) for number in range(256))
"""Maps any byte to a letter of the alphabet; the slight preference for some costs no bit."""


def uid() -> str:
    """Make an object uid."""
    return str(uuid.uuid4())


def sandbox_id() -> str:
    """Make a public sandbox id: `i` and 20 of `[a-z0-9]`; no dash, as host names split on it."""
    # Thousands are made at once for a batch: one look at the generator each, not twenty.
    return "i" + secrets.token_bytes(20).translate(_LETTERS).decode()


def name_suffix(length: int = 5) -> str:
    """Make the random tail of a generated name."""
    return "".join(secrets.choice(_NAME_ALPHABET) for _ in range(length))


def request_id() -> str:
    """Make an id for one request or one reconcile."""
    return secrets.token_hex(16)


def token(size_bytes: int = 32) -> str:
    """Make a secret, as hex."""
    return secrets.token_hex(size_bytes)


def api_key() -> str:
    """Make an API key in the form that E2B's clients accept."""
    return "e2b_" + secrets.token_hex(20)
