"""Files of an installation: no other user of the machine reads them or runs them."""

import os
import shutil
import stat
import subprocess
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from paddock.app.up.supervisor import make_private
from paddock.runtime.local.images.base import keep_private
from tests.cli.test_machine import Machine

_CONTENT = ("node/layers", "node/images/layers", "node/storage", "node/views", "node/devices")
"""Files that sandboxes see; only their parent directories are private."""


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Generator[Machine]:
    """A running installation whose directories existed with wide modes."""
    cache = tmp_path_factory.mktemp("cache")
    made = Machine(PADDOCK_DEFAULT_IMAGE="host", PADDOCK_CACHE_DIR=str(cache))
    (made.state / "logs").mkdir(parents=True)
    (made.state / "logs" / "node.log").write_text("of an older version\n")
    for path in (made.home, made.state, made.state / "logs"):
        path.chmod(0o755)
    (made.state / "logs" / "node.log").chmod(0o644)
    before = os.umask(0o022)
    try:
        started = made.run("up", "--detach")
        assert started.returncode == 0, started.stderr
        made("sandbox", "create")
        yield made
    finally:
        os.umask(before)
        made.remove()


def _walk(root: Path, content: tuple[str, ...]) -> Iterator[Path]:
    yield root
    for directory, names, files in os.walk(root):
        here = Path(directory)
        yield from (here / name for name in (*names, *files))
        names[:] = [name for name in names if str((here / name).relative_to(root)) not in content]


@pytest.mark.sandbox
@pytest.mark.timeout(180)
def test_no_file_of_state_run_or_log_is_open_to_other_users(installation: Machine) -> None:
    kinds: set[int] = set()
    for root in (installation.state, installation.home / "run"):
        for path in _walk(root, _CONTENT):
            facts = path.lstat()
            kinds.add(stat.S_IFMT(facts.st_mode))
            assert stat.S_ISLNK(facts.st_mode) or not facts.st_mode & 0o077, path
    assert {stat.S_IFDIR, stat.S_IFREG, stat.S_IFSOCK} <= kinds
    assert (installation.state / "logs" / "node.log").read_text()


@pytest.mark.sandbox
def test_other_users_cannot_run_set_uid_programs_of_the_base_image(tmp_path: Path) -> None:
    for parent in (tmp_path, *tmp_path.parents):
        if parent.stat().st_uid == os.geteuid() and not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o711)
    program = tmp_path / "base-0123" / "rootfs" / "id"
    program.parent.mkdir(parents=True)
    shutil.copy("/usr/bin/id", program)
    program.chmod(0o4755)
    for path in (program.parent, program.parent.parent):
        path.chmod(0o755)

    def run_as(group: int) -> str | None:
        user = ["setpriv", "--reuid", "12345", "--regid", str(group), "--clear-groups"]
        # By a shell: setpriv's own exec still has more permissions.
        command = [*user, "/bin/sh", "-c", f"exec {program} -u"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else None

    assert run_as(12345) == "0"
    keep_private(tmp_path)
    assert run_as(12345) is None
    # An operator may share it with the user of a rootless node.
    os.chown(program.parent.parent, 0, 12345)
    program.parent.parent.chmod(0o755)
    keep_private(tmp_path)
    assert run_as(12345) == "0"
    assert run_as(12346) is None


def test_a_directory_of_an_older_version_is_closed(tmp_path: Path) -> None:
    log = tmp_path / "state" / "logs" / "control.log"
    log.parent.mkdir(parents=True)
    log.write_text("secret")
    (tmp_path / "state" / "link").symlink_to(tmp_path)
    before = tmp_path.stat().st_mode
    make_private(tmp_path / "state")
    for path in (log, log.parent, log.parent.parent):
        assert not path.stat().st_mode & 0o077
    assert tmp_path.stat().st_mode == before
