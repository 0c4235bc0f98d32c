"""Encryption of stored data: keys with ids, bound to what the data belongs to."""

import pytest

from paddock.kit.encryption import DataCipher, DecryptionError, create_key, key_id_of


def test_encrypted_data_can_be_read_with_its_key_and_names_it() -> None:
    key = create_key()
    data = DataCipher([key]).encrypt(b"canary", "Sandbox\0default\0a")
    assert b"canary" not in data
    assert key_id_of(data) == key.id
    assert DataCipher([key]).decrypt(data, "Sandbox\0default\0a") == b"canary"


def test_plain_text_has_no_key() -> None:
    assert key_id_of(b'{"kind":"Sandbox"}') is None
    assert key_id_of(b"") is None


def test_older_keys_decrypt_and_the_first_one_encrypts() -> None:
    old, new = create_key(), create_key()
    cipher = DataCipher([old])
    before = cipher.encrypt(b"before", "x")
    cipher.use([new, old])
    assert cipher.decrypt(before, "x") == b"before"
    assert key_id_of(cipher.encrypt(b"after", "x")) == new.id == cipher.key_id


def test_a_missing_key_is_named() -> None:
    key = create_key()
    data = DataCipher([key]).encrypt(b"x", "Sandbox\0default\0a")
    with pytest.raises(DecryptionError, match=f"Sandbox default a .*{key.id}.*not in the keyring"):
        DataCipher([create_key()]).decrypt(data, "Sandbox\0default\0a")


@pytest.mark.parametrize("position", [6, 20, 30, -1])
def test_changed_data_is_refused(position: int) -> None:
    cipher = DataCipher([create_key()])
    data = bytearray(cipher.encrypt(b"0123456789", "x"))
    data[position] ^= 1
    with pytest.raises(DecryptionError, match="was changed"):
        cipher.decrypt(bytes(data), "x")


def test_data_cannot_be_moved_to_another_object() -> None:
    cipher = DataCipher([create_key()])
    data = cipher.encrypt(b"of a", "Sandbox\0default\0a")
    with pytest.raises(DecryptionError):
        cipher.decrypt(data, "Sandbox\0default\0b")


def test_no_head_is_used_twice() -> None:
    """A nonce that repeats under one key would reveal plain text."""
    key = create_key()
    heads = {
        cipher.encrypt(b"same", "x")[:25]
        for cipher in (DataCipher([key]) for _ in range(20))
        for _ in range(50)
    }
    assert len(heads) == 1000


def test_a_key_is_not_shown() -> None:
    key = create_key()
    assert key.key not in repr(key)
