"""Encryption of stored data: AES-256-GCM with keys that have ids, so that they can be rotated.

Encrypted data begins with the id of its key. Each encrypting process derives a key of its own from
that key and a random salt, and numbers what it encrypts: no nonce is ever used twice, however much
a process writes. Data is bound to what it belongs to: moved elsewhere, it cannot be decrypted.

    format 1 (1 byte) | key id (4) | salt (12) | number (8) | ciphertext | tag (16)
"""

import hashlib
import hmac
import os
import secrets
from collections.abc import Sequence
from itertools import count

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from msgspec import Struct

from paddock.kit.errors import UnavailableError

_FORMAT = b"\x01"
_ID = slice(1, 5)
_SALT = slice(5, 17)
_NUMBER = slice(17, 25)
_HEAD_BYTES = 25
_KEY_BYTES = 32
_PAD = bytes(4)
_MAX_DERIVED = 4096
"""Derived keys that are cached; one per process that wrote data which still exists."""


class EncryptionKey(Struct, frozen=True, kw_only=True):
    """A key with its id, both in hexadecimal digits."""

    id: str
    key: str

    def __repr__(self) -> str:
        return f"EncryptionKey(id={self.id!r})"


class DecryptionError(UnavailableError):
    """Stored data cannot be decrypted: its key is missing, or the data is damaged."""


def create_key() -> EncryptionKey:
    """Return a new random key."""
    return EncryptionKey(id=secrets.token_hex(4), key=secrets.token_hex(_KEY_BYTES))


def key_id_of(data: bytes) -> str | None:
    """Return the id of the key that encrypted the data, or None if it is not encrypted."""
    return data[_ID].hex() if data[:1] == _FORMAT else None


class DataCipher:
    """Encrypts with the first of its keys and decrypts with any."""

    def __init__(self, keys: Sequence[EncryptionKey]) -> None:
        self._derived: dict[bytes, AESGCM] = {}
        self.use(keys)

    def use(self, keys: Sequence[EncryptionKey]) -> None:
        """Replace the keys; the first one encrypts from now on."""
        self._keys = {key.id: bytes.fromhex(key.key) for key in keys}
        self._derived.clear()
        head = bytes.fromhex(keys[0].id) + os.urandom(_SALT.stop - _SALT.start)
        # One attribute, so that a thread that encrypts meanwhile never mixes two keys.
        self._writing = (_FORMAT + head, self._derive(head, "new data"), count())

    @property
    def prefix(self) -> bytes:
        """What data begins with that is encrypted with the key in use."""
        return self._writing[0][: _ID.stop]

    @property
    def key_id(self) -> str:
        """The id of the key in use."""
        return self.prefix[_ID].hex()

    def encrypt(self, data: bytes, belongs_to: str) -> bytes:
        """Return the data encrypted, bound to what it belongs to."""
        head, key, numbers = self._writing
        number = next(numbers).to_bytes(8, "big")
        return head + number + key.encrypt(_PAD + number, data, belongs_to.encode())

    def decrypt(self, data: bytes, belongs_to: str) -> bytes:
        """Return the data decrypted; `DecryptionError` names what it belongs to."""
        head = data[_ID.start : _SALT.stop]
        key = self._derived.get(head) or self._derive(head, belongs_to)
        try:
            return key.decrypt(_PAD + data[_NUMBER], data[_HEAD_BYTES:], belongs_to.encode())
        except InvalidTag as error:
            raise DecryptionError(
                f"the stored {_named(belongs_to)} cannot be decrypted with key {data[_ID].hex()}: "
                "the data or the key was changed",
                hint="restore the store or the keyring from a backup",
            ) from error

    def _derive(self, head: bytes, belongs_to: str) -> AESGCM:
        key_id, salt = head[:4].hex(), head[4:]
        secret = self._keys.get(key_id)
        if secret is None:
            raise missing_key(key_id, belongs_to)
        if len(self._derived) >= _MAX_DERIVED:
            self._derived.clear()
        derived = AESGCM(hmac.new(secret, b"paddock data\0" + salt, hashlib.sha256).digest())
        self._derived[head] = derived
        return derived


def missing_key(key_id: str, belongs_to: str) -> DecryptionError:
    """Return the error for data whose key is not in the keyring."""
    return DecryptionError(
        f"the stored {_named(belongs_to)} is encrypted with key {key_id}, "
        "which is not in the keyring of this installation",
        hint="restore the keyring that belongs to this store; nothing was changed",
    )


def _named(belongs_to: str) -> str:
    return " ".join(filter(None, belongs_to.split("\0")))
