"""The secrets of an installation, and how they are rotated. No I/O.

A seed or encryption key that is replaced stays in the keyring, because something may still use it:
a sandbox its token, a row of the store its key.
"""

import hashlib
import secrets

from msgspec import Struct, structs

from paddock.kit import encryption, ids
from paddock.kit.encryption import EncryptionKey


class Secrets(Struct, frozen=True, kw_only=True):
    """Secrets that all processes share and that survive restarts."""

    seed: str
    """The tokens of sandboxes and the signatures of peers are derived from it."""
    token: str
    """Bearer token of the declarative and the internal API."""
    api_key: str
    """The first API key, with the role operator."""
    previous_seeds: tuple[str, ...] = ()
    """Seeds that sandboxes or messages may still use."""
    encryption_keys: tuple[EncryptionKey, ...] = ()
    """Keys of the store: the first encrypts, the others only decrypt."""

    def __repr__(self) -> str:
        return "Secrets(…)"


def generated() -> Secrets:
    """Return new secrets."""
    return Secrets(
        seed=secrets.token_hex(32),
        token=secrets.token_hex(24),
        api_key=ids.api_key(),
        encryption_keys=(encryption.create_key(),),
    )


def with_encryption_key(current: Secrets) -> Secrets:
    """Return the secrets with a key, if they were written before data was encrypted."""
    return current if current.encryption_keys else with_new_encryption_key(current)


def with_new_encryption_key(current: Secrets) -> Secrets:
    """Return the secrets with a new key for the store."""
    keys = (encryption.create_key(), *current.encryption_keys)
    return structs.replace(current, encryption_keys=keys)


def with_new_seed(current: Secrets) -> Secrets:
    """Return the secrets with a new seed."""
    return structs.replace(
        current,
        seed=secrets.token_hex(32),
        previous_seeds=(current.seed, *current.previous_seeds),
    )


def with_new_token(current: Secrets) -> Secrets:
    """Return the secrets with a new bearer token; the old one is no longer accepted."""
    return structs.replace(current, token=secrets.token_hex(24))


def fingerprint(secret: str) -> str:
    """Return a short name for a secret, from which it cannot be computed."""
    return hashlib.sha256(f"paddock fingerprint:{secret}".encode()).hexdigest()[:8]
