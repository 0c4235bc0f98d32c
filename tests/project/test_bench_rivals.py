"""Systems that the benchmarks compare with leave nothing on the machine."""

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.leaks import Machine

ROOT = Path(__file__).parents[2]

sys.path.insert(0, str(ROOT / "bench"))
import floors  # noqa: E402
import hibernate_fork  # noqa: E402
import reporting  # noqa: E402
import rivals  # noqa: E402

sys.path.remove(str(ROOT / "bench"))


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directories in place of the control groups: two hierarchies, one of them with two names."""
    root = tmp_path / "groups"
    (root / "cpu,cpuacct").mkdir(parents=True)
    (root / "cpu").symlink_to("cpu,cpuacct")
    (root / "pids").mkdir()
    monkeypatch.setattr(rivals, "GROUPS", root)
    return root


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary directory of its own, as each suite has one, with what is registered there."""
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


def test_groups_below_the_group_of_a_rival_are_removed_with_it(groups: Path, notes: Path) -> None:
    with rivals.control_group() as name:
        (groups / "cpu" / name / "conmon" / name).mkdir(parents=True)
        (groups / "pids" / name / "conmon").mkdir(parents=True)
        (groups / "pids" / "another").mkdir()

    assert sorted(path.name for path in groups.glob("*/*")) == ["another"]


def test_a_group_of_a_rival_that_cannot_be_removed_is_left_behind(
    groups: Path, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.leaks._GROUPS", groups)
    busy = rivals.control_group()
    name = busy.__enter__()
    (groups / "pids" / name).mkdir()
    (groups / "pids" / name / "busy").touch()

    with pytest.raises(OSError, match="not empty"):
        busy.__exit__(None, None, None)

    assert Machine(notes, notes).left() == [f"control group {groups}/pids/{name}"]


def test_a_group_that_was_there_before_is_kept_and_not_counted(groups: Path, notes: Path) -> None:
    (groups / "pids" / "libpod_parent" / "conmon").mkdir(parents=True)

    with rivals.removed_group("libpod_parent"):
        pass

    assert (groups / "pids" / "libpod_parent" / "conmon").is_dir()
    assert list(notes.iterdir()) == []


def test_a_file_is_removed_with_the_directories_that_were_made_for_it(tmp_path: Path) -> None:
    kept, made = tmp_path / "kept", tmp_path / "containers" / "cache" / "blobs"
    kept.touch()

    with rivals.removed_file(made), rivals.removed_file(kept):
        made.parent.mkdir(parents=True)
        made.touch()

    assert list(tmp_path.iterdir()) == [kept]


def test_a_failed_start_does_not_interrupt_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that is killed while it starts a container cannot list and remove it later."""
    commands = iter([["false"], ["sh", "-c", f"sleep 0.3; touch {tmp_path}/started"]])
    seen: list[Path] = []

    @contextlib.contextmanager
    def engine() -> Generator[floors.Command]:
        try:
            yield lambda inner, stays: next(commands)
        finally:
            seen.extend(tmp_path.iterdir())

    monkeypatch.setattr(floors, "ALTERNATIVES", {"podman": (engine, 1.0)})
    with pytest.raises(floors.AbsentError), floors.held("podman", 2):
        pass

    assert [path.name for path in seen] == ["started"]


@pytest.fixture
def calls(notes: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Every command, in place of being run, with the namespace that it would enter."""
    made: list[list[str]] = []
    numbers = iter(range(9))

    @contextlib.contextmanager
    def private_mounts(**_: bool) -> Generator[list[str]]:
        yield ["nsenter", f"--mount={next(numbers)}"]

    monkeypatch.setattr(floors, "private_mounts", private_mounts)
    monkeypatch.setattr(floors, "image", lambda _: Path("/image"))
    monkeypatch.setattr(floors, "program", lambda name: name)
    monkeypatch.setattr(floors, "run", lambda words: made.append(words) or "id\n")
    monkeypatch.setattr(sys, "argv", ["sample.py", "--quick"])
    return made


def test_all_commands_of_podman_use_one_namespace_and_one_storage_of_the_suite(
    calls: list[list[str]], notes: Path
) -> None:
    hibernate_fork.podman_checkpoint(reporting.Report("sample"), 1)

    verbs = ("run", "container", "rm")
    starts = {tuple(call[: min(call.index(v) for v in verbs if v in call)]) for call in calls}
    (start,) = starts
    assert start[:3] == ("nsenter", "--mount=0", "podman")
    for flag in ("--root", "--runroot", "--tmpdir"):
        assert Path(start[start.index(flag) + 1]).is_relative_to(notes)
    assert calls[0][calls[0].index("--network") + 1] == "none"
    assert calls[0][calls[0].index("--cgroup-parent") + 1].startswith(rivals.LABEL)
    assert calls[-1][len(start) :] == ["rm", "--all", "--force", "--time", "0"]


FRESH = """
for place in /dev/shm /var/lib /run; do mount -t tmpfs tmpfs $place || exit 1; done
exec "$@"
"""
"""Directories of the machine as they are before podman was ever used."""
STARTS = """
import json, os, sys
from pathlib import Path

sys.path[:0] = sys.argv[1:]
sys.argv[1:] = ["--quick"]
import floors, hibernate_fork, reporting

def present():
    places = map(Path, ("/run", "/dev/shm", "/var/lib"))
    return {str(path) for place in places for path in place.iterdir()}

before = present()
report = reporting.Report("sample")
with floors.podman() as command:
    floors.hello(command)
with floors.held("podman", 3):
    pass
stranger = Path("/sys/fs/cgroup/unified", f"paddock-bench-{os.getpid()}-stranger")
stranger.mkdir()
run = floors.run

def removing(words):
    if "restore" in words and stranger.exists():
        stranger.rmdir()  # between a checkpoint and its restore, which must not create it again
    return run(words)

floors.run = removing
hibernate_fork.podman_checkpoint(report, 2)
left = sorted(present() - before)
groups = Path("/sys/fs/cgroup").glob(f"*/paddock-bench-{os.getpid()}-*")
print(json.dumps({"left": left, "groups": [str(path) for path in groups], **report.missing}))
"""


@pytest.mark.sandbox
def test_podman_leaves_nothing_on_a_fresh_machine() -> None:
    try:
        floors.image("podman")
        floors.program("runc")
    except floors.AbsentError as error:
        pytest.skip(f"podman cannot be started: {error}")
    with tempfile.TemporaryDirectory(prefix="pb") as place:
        fresh = ["env", f"TMPDIR={place}", "unshare", "-m", "sh", "-c", FRESH, "sh"]
        script = [sys.executable, "-c", STARTS, str(ROOT / "bench"), str(ROOT), str(ROOT / "src")]
        done = subprocess.run([*fresh, *script], capture_output=True, text=True, check=False)

        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout.splitlines()[-1])
        assert result.pop("left") == []
        assert result.pop("groups") == []
        # Without a working CRIU nothing is measured; otherwise nothing may be missing.
        assert not result or not floors.CRIU
        assert Machine(Path(place), Path(place)).left() == []
