"""The leak check finds each kind of leak, and only its own."""

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFTEST = """
from tests import leaks

leaks.PATIENCE_SECONDS = {patience}


def pytest_configure(config):
    config.pluginmanager.register(leaks.Watch(config), "leaks")
"""
LEAKS = """
import asyncio, os, subprocess, tempfile, threading
from tests import leaks

async def main():
    asyncio.create_task(asyncio.sleep(9), name="forgotten")

asyncio.run(main())
subprocess.Popen(["sleep", "637"])
subprocess.run("setsid -f sleep 638", shell=True)
tempfile.mkdtemp(prefix="forgotten-")
# Ends with the process, which would wait for any other one.
threading.Thread(target=threading.main_thread().join, name="lasting").start()
for _ in range(20):
    os.pipe()
leaks.note_group("..")  # stands for one that is still there
"""
NAMED = (
    "task forgotten",
    "thread lasting",
    "sleep 637, by test_it.py::test_it",
    "sleep 638, by test_it.py::test_it",
    "/forgotten-",
    "descriptors: pipe, since test_it.py::test_it",
    "control group",
)


MOUNTED = """
import os, subprocess, tempfile
from pathlib import Path
from tests import leaks

place = Path(tempfile.mkdtemp(prefix="place-"))
for name in ("mounted", "named", "image", "lock"):
    (place / name).touch()
subprocess.run(["mount", "--bind", "/dev/null", place / "mounted"], check=True)
os.truncate(place / "image", 1 << 20)
subprocess.run(["losetup", "--find", place / "image"], check=True)
subprocess.run(["unshare", f"--net={{place / 'named'}}", "true"], check=True)
pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
with subprocess.Popen(["unshare", "--net", "sh", "-c", "echo there; read end"], **pipes) as child:
    child.stdout.readline()
    os.open(f"/proc/{{child.pid}}/ns/net", os.O_RDONLY)
    child.communicate()
Path({group!r}).mkdir()
leaks.note_group(Path({group!r}).name)
leaks.note_node(place, place / "lock", {number})
subprocess.run(
    ["ip", "link", "add", "pd{number}-0", "type", "veth", "peer", "name", "pd{number}-1"],
    check=True,
)
"""
NO_FABRIC = 637
"""A number that no fabric has."""


def run(
    directory: Path, body: str, *options: str, patience: float
) -> subprocess.CompletedProcess[str]:
    (directory / "conftest.py").write_text(CONFTEST.format(patience=patience))
    lines = "\n    ".join(body.splitlines())
    (directory / "test_it.py").write_text(f"def test_it():\n    {lines}\n")
    temporary = directory / "tmp"
    temporary.mkdir()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)}
    environment.pop("PYTEST_XDIST_WORKER", None)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "-p", "no:cacheprovider",
         f"--basetemp={directory}/base", "--rootdir", str(directory), "-c", os.devnull,
         str(directory / "test_it.py"), *options],
        env=environment, cwd=directory, capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip


@pytest.mark.timeout(300)
@pytest.mark.parametrize("workers", [(), ("-n", "1")], ids=["alone", "worker"])
def test_leaks_of_a_test_fail_the_run_and_are_named(
    workers: tuple[str, ...], tmp_path: Path
) -> None:
    done = run(tmp_path, LEAKS, *workers, patience=1)
    try:
        assert "1 passed" in done.stdout, done.stdout + done.stderr
        assert done.returncode == 1, done.stdout
        assert "left behind" in done.stdout
        missed = [what for what in NAMED if what not in done.stdout]
        assert not missed, (missed, done.stdout)
    finally:
        _end_sleepers(tmp_path)


@pytest.mark.sandbox
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts and links are made by root")
@pytest.mark.timeout(300)
def test_leaks_in_the_kernel_are_named_too(tmp_path: Path) -> None:
    place = f"{tmp_path}/tmp/.*/place-.*"
    roots = [root for root in (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup"))
             if (root / "cgroup.procs").exists()]  # fmt: skip
    group = roots[0] / f"leaks-{os.getpid()}"
    code = MOUNTED.format(group=str(group), number=NO_FABRIC)
    try:
        done = run(tmp_path, code, patience=1)
        assert "1 passed" in done.stdout, done.stdout + done.stderr
        assert done.returncode == 1, done.stdout
        for named in (
            f"mount {place}/mounted",
            rf"namespace net:\[\d+\] by its mount {place}/named",
            r"namespace net:\[\d+\] by 1 descriptors, since test_it.py::test_it",
            rf"loop device loop\d+ of {place}/image",
            f"control group {group}",
            rf"links \['pd{NO_FABRIC}-[01]', 'pd{NO_FABRIC}-[01]'\]",
        ):
            assert re.search(named, done.stdout), (named, done.stdout)
    finally:
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            if (point := line.split()[4]).startswith(f"{tmp_path}/"):
                subprocess.run(["umount", point], check=False)
        for file in Path("/sys/block").glob("loop*/loop/backing_file"):
            if file.read_text().startswith(f"{tmp_path}/"):
                subprocess.run(["losetup", "--detach", f"/dev/{file.parts[3]}"], check=False)
        subprocess.run(["ip", "link", "delete", f"pd{NO_FABRIC}-0"], check=False)
        with contextlib.suppress(FileNotFoundError):
            group.rmdir()


@pytest.mark.timeout(300)
def test_a_run_without_leaks_passes_and_removes_its_directory(tmp_path: Path) -> None:
    # Processes and directories of others on the same machine are ignored.
    with subprocess.Popen(["sleep", "639"]) as other:
        (tmp_path / "somebody else's").mkdir()
        code = "import tempfile\nwith tempfile.TemporaryDirectory(): pass"
        try:
            done = run(tmp_path, code, "-n", "2", patience=30)
        finally:
            other.kill()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "left behind" not in done.stdout
    assert not list((tmp_path / "tmp").iterdir())


def _end_sleepers(directory: Path) -> None:
    mark = f"TMPDIR={directory}/tmp/".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in path.read_bytes():
                os.kill(int(path.parent.name), 9)
        except OSError:
            continue
