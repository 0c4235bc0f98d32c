"""The host image, while files of the machine change."""

import shutil
from pathlib import Path

from paddock.runtime.local.images import host


def test_files_may_be_removed_during_the_scan(tmp_path: Path):
    # given closed files, and an open directory that is removed once one of them is found
    for name in ("closed", "other"):
        (tmp_path / name).touch(mode=0o600)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)  # regardless of the umask
    (tmp_path / "open" / "closed").touch(mode=0o600)

    found = []
    for path in host._unreadable(str(tmp_path)):
        found.append(path)
        shutil.rmtree(tmp_path / "open", ignore_errors=True)

    # then the rest was still scanned
    assert sorted(found) == [tmp_path / "closed", tmp_path / "other"]
