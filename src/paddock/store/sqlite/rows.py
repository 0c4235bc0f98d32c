"""Bodies of rows: encrypted with the key in use, bound to the object that they belong to.

Kind, namespace and name are columns and stay readable. Rows that an older version wrote are plain
text; they are read as they are until they are rewritten.
"""

from paddock.kit.encryption import DataCipher, key_id_of, missing_key

PLAIN = ""
"""Stands for the key of rows that are not encrypted."""


class RowCodec:
    """Encrypts and decrypts bodies; without a cipher they stay plain text."""

    def __init__(self, cipher: DataCipher | None) -> None:
        self._cipher = cipher

    @property
    def key(self) -> str:
        """The key of new rows."""
        return PLAIN if self._cipher is None else self._cipher.key_id

    @property
    def prefix(self) -> bytes:
        """What bodies of the key in use begin with."""
        return b"{" if self._cipher is None else self._cipher.prefix

    def encode(self, kind: str, namespace: str, name: str, body: bytes) -> bytes:
        """Return a body as it is stored."""
        if self._cipher is None:
            return body
        return self._cipher.encrypt(body, f"{kind}\0{namespace}\0{name}")

    def decode(self, kind: str, namespace: str, name: str, stored: bytes) -> bytes:
        """Return a stored body in plain text; `DecryptionError` if its key is missing."""
        if stored[:1] == b"{":
            return stored
        key = key_id_of(stored)
        place = f"{kind}\0{namespace}\0{name}"
        if key is None:
            return stored  # damaged: its decoder reports it
        if self._cipher is None:
            raise missing_key(key, place)
        return self._cipher.decrypt(stored, place)
