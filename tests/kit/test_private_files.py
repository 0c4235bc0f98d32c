"""Files that only their owner can read."""

import os
import stat
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from paddock.kit import private_files


@pytest.fixture(autouse=True)
def wide_umask() -> Generator[None]:
    """A umask that would leave new files open to everybody."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.parametrize("write", [private_files.replace, private_files.create])
def test_only_the_owner_can_read_the_file(
    write: Callable[[Path, bytes], object], tmp_path: Path
) -> None:
    write(tmp_path / "secret", b"content")
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600
    assert (tmp_path / "secret").read_bytes() == b"content"
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


def test_a_replaced_file_loses_its_wide_mode(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"a longer older content")
    path.chmod(0o644)
    private_files.replace(path, b"new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_bytes() == b"new"


def test_a_link_is_replaced_and_its_target_stays(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"of somebody else")
    (tmp_path / "secret").symlink_to(tmp_path / "target")
    private_files.replace(tmp_path / "secret", b"new")
    assert (tmp_path / "target").read_bytes() == b"of somebody else"
    assert not (tmp_path / "secret").is_symlink()


def test_an_existing_file_is_not_created_again(tmp_path: Path) -> None:
    assert private_files.create(tmp_path / "secret", b"first")
    assert not private_files.create(tmp_path / "secret", b"second")
    assert (tmp_path / "secret").read_bytes() == b"first"
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


@pytest.mark.parametrize("write", [private_files.replace, private_files.create])
@pytest.mark.parametrize("call", ["fsync", "link", "replace"])
def test_a_write_that_fails_leaves_the_file_as_it_was(
    write: Callable[[Path, bytes], object],
    call: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if write is private_files.replace:
        private_files.create(tmp_path / "secret", b"old")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    for module in (os, Path):
        if hasattr(module, call):
            monkeypatch.setattr(module, call, fail)
    is_used = call == "fsync" or (call == "replace") == (write is private_files.replace)
    if is_used:
        with pytest.raises(OSError, match="No space left"):
            write(tmp_path / "secret", b"new")
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    else:
        write(tmp_path / "secret", b"new")
