"""The machine's own software as an image, while it changes."""

import shutil
from pathlib import Path

from paddock.runtime.local.images import host


def test_software_may_go_while_it_is_looked_through(tmp_path: Path):
    # given something closed, and an open directory that is removed once the former is found
    for name in ("closed", "other"):
        (tmp_path / name).touch(mode=0o600)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)  # whatever is masked out where this runs
    (tmp_path / "open" / "closed").touch(mode=0o600)

    found = []
    for path in host._unreadable(str(tmp_path)):
        found.append(path)
        shutil.rmtree(tmp_path / "open", ignore_errors=True)

    # then what is left was still looked at
    assert sorted(found) == [tmp_path / "closed", tmp_path / "other"]
