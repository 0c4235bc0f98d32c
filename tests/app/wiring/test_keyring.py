"""The keyring of an installation: created once, upgraded, never created beside a store."""

import os
import stat
import threading
from pathlib import Path

import msgspec
import pytest

from paddock.app.wiring.secrets import load_or_create
from paddock.installation import secrets_file
from paddock.installation.secrets import with_new_encryption_key
from paddock.kit.errors import InvalidError
from paddock.settings import Settings


def of(directory: Path, **settings: str) -> Settings:
    return Settings(state_dir=str(directory / "state"), **settings)


def test_a_new_installation_has_a_key_and_keeps_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        created = load_or_create(of(tmp_path))
    finally:
        os.umask(before)
    assert len(created.encryption_keys) == 1
    assert load_or_create(of(tmp_path)) == created
    path = tmp_path / "state" / "secrets.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert created.seed not in repr(created)


def test_secrets_of_an_older_version_get_a_key_and_keep_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "state" / "secrets.json"
    path.parent.mkdir()
    older = {"seed": "s" * 64, "token": "t" * 48, "api_key": "e2b_" + "0" * 40}
    path.write_bytes(msgspec.json.encode(older))
    (tmp_path / "state" / "store.db").touch()
    loaded = load_or_create(of(tmp_path))
    assert (loaded.seed, loaded.token, loaded.api_key) == tuple(older.values())
    assert len(loaded.encryption_keys) == 1
    assert load_or_create(of(tmp_path)) == loaded


def test_a_keyring_can_be_on_another_disk(tmp_path: Path) -> None:
    disk = tmp_path / "disk" / "keyring.json"
    created = load_or_create(of(tmp_path, keyring_file=str(disk)))
    assert secrets_file.read(disk) == created
    assert not (tmp_path / "state" / "secrets.json").exists()


@pytest.mark.parametrize("name", ["", "disk/keyring.json"])
def test_a_missing_keyring_is_not_created_beside_an_existing_store(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "store.db").write_bytes(b"rows")
    settings = of(tmp_path, keyring_file=str(tmp_path / name) if name else "")
    with pytest.raises(InvalidError, match=r"is missing, but the store .* exists") as caught:
        load_or_create(settings)
    assert "restore the keyring" in caught.value.hint
    assert not settings.keyring.exists()


def test_a_damaged_keyring_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "state" / "secrets.json"
    path.parent.mkdir()
    path.write_text('{"seed": "x"')
    with pytest.raises(InvalidError, match="is damaged"):
        load_or_create(of(tmp_path))
    assert path.read_text() == '{"seed": "x"'


def test_concurrent_changes_are_not_lost(tmp_path: Path) -> None:
    load_or_create(of(tmp_path))
    path = tmp_path / "state" / "secrets.json"

    def rotate() -> None:
        for _ in range(10):
            secrets_file.update(path, with_new_encryption_key)

    threads = [threading.Thread(target=rotate) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = secrets_file.read(path)
    assert found is not None
    assert len({key.id for key in found.encryption_keys}) == 41
