"""Temporary files of copies: they have no name, and names that were left are removed."""

import errno
import os
from pathlib import Path

import pytest

from paddock.envd.files import copy_routes


def test_a_temporary_file_has_no_name(tmp_path: Path) -> None:
    with copy_routes._unnamed_file(str(tmp_path)) as file:
        file.write(b"data")
        assert list(tmp_path.iterdir()) == []
        file.seek(0)
        assert file.read() == b"data"


def test_without_unnamed_files_names_that_a_killed_envd_left_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f".copy-{'0a' * 8}").write_bytes(b"left")
    (tmp_path / ".copy-of-a-user").write_bytes(b"kept")
    real = os.open

    def without_tmpfile(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", without_tmpfile)
    with copy_routes._unnamed_file(str(tmp_path)) as file:
        file.write(b"data")
        assert [path.name for path in tmp_path.iterdir()] == [".copy-of-a-user"]
