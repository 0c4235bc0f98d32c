"""The leak check at the end of every test run: no run may leave anything behind.

Each run has its own directory for temporary files, whose name is in the environment of every
process that the run starts. So leaks of this run are known on a shared machine: processes by their
environment, files and mounts by their path, control groups and links by the nodes that were
registered here (`note_node`, `note_group`). A namespace is held by a process, a mount or a
descriptor, and is found with these.

Every process of the run (each xdist worker, or the only one) checks itself after its tests:
descriptors, threads, child processes, and tasks that were pending when their loop was closed. Then
the leading process checks the machine. Leaks fail the run; each is listed with its test where that
is known.
"""

import asyncio
import asyncio.runners
import collections
import contextlib
import fcntl
import gc
import hashlib
import inspect
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

SPARE_DESCRIPTORS = 8
"""Libraries may keep a few: a selector, the random device."""
OTHERS_CACHES = ("node-compile-cache",)
"""Files that other programs keep in the temporary directory."""
PATIENCE_SECONDS = 60.0
"""How long the kernel may take to finish on a busy machine."""
TURNS = 20
"""Loop iterations that ending tasks get before their loop is closed."""
_NOTES, _LEFT = ".notes", ".left"
_GROUPS = Path("/sys/fs/cgroup")
_NAMESPACES = ("net:[", "mnt:[", "pid:[", "user:[", "ipc:[", "uts:[")
_DEVICES = ("/dev/ptmx", "/ptmx", "/dev/pts/", "/memfd:", "/proc/")


def note_node(state: Path, fabric_lock: Path | None = None, number: int | None = None) -> None:
    """Register a node: everything with its name belongs to this run."""
    node_id = hashlib.sha256(str(state.absolute()).encode()).hexdigest()[:8]
    _note("group", f"paddock-{node_id}")
    if fabric_lock is not None:
        _note("links", f"{number} {fabric_lock}")


def note_group(name: str) -> None:
    """Register a control group, by its name below the root of the hierarchy."""
    _note("group", name)


def _note(kind: str, what: str) -> None:
    with (Path(tempfile.gettempdir()) / _NOTES).open("a") as notes:
        notes.write(f"{kind} {what}\n")


class Baseline:
    """What a test process had when it started."""

    def __init__(self) -> None:
        self._children = _children()
        self._threads = _threads()
        self._descriptors = _descriptors()
        self._since: dict[str, str] = {}

    def look(self, test: str) -> None:
        """Record which test first had a descriptor."""
        for what in _descriptors():
            self._since.setdefault(what, test)

    def left(self) -> list[str]:
        """Return what was added since."""
        gc.collect()
        left = [f"process {item}" for item in _children() - self._children]
        left += [f"thread {item.name}" for item in _threads() - self._threads]
        grown = _descriptors() - self._descriptors
        # No library keeps one, and each holds a whole namespace.
        for what in [what for what in grown if what.startswith(_NAMESPACES)]:
            test = self._since.get(what, "the end of the run")
            left.append(f"namespace {what} by {grown.pop(what)} descriptors, since {test}")
        if grown.total() > SPARE_DESCRIPTORS:
            kinds = collections.Counter[str]()
            for what, count in grown.items():
                test = self._since.get(what, "the end of the run")
                kinds[f"descriptors: {what.partition(':[')[0]}, since {test}"] += count
            left += [f"{count} {kind}" for kind, count in kinds.most_common()]
        return left


def _children() -> set[str]:
    """Child processes that do not belong to Python itself."""
    found: set[str] = set()
    for thread in Path("/proc/self/task").iterdir():
        try:
            pids = (thread / "children").read_text().split()
        except OSError:  # the thread has ended
            continue
        for pid in pids:
            command = _command(pid)
            if command is not None and "multiprocessing" not in command:
                found.add(f"{pid} {command}")
    return found


def _command(pid: str) -> str | None:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return None
    return (command.strip() or "that has ended and was not waited for")[:200]


def _threads() -> set[threading.Thread]:
    """Threads that keep the process from exiting."""
    return {
        item
        for item in threading.enumerate()
        if item is not threading.main_thread() and not item.daemon
    }


def _descriptors() -> collections.Counter[str]:
    """Open descriptors by target: numbers are reused.

    Files count if they are temporary: libraries keep their own open.
    """
    found = collections.Counter[str]()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            what = str(path.readlink())
            if not what.startswith("/") or what.startswith((tempfile.gettempdir(), *_DEVICES)):
                found[what] += 1
    return found


class Machine:
    """What this run has on the machine, except the test processes."""

    def __init__(self, place: Path, tests: Path) -> None:
        self._place = place
        self._roots = (f"{place}/", f"{tests}/")
        self._mark = f"TMPDIR={place}\0".encode()

    def left(self) -> list[str]:
        """Return what exists now."""
        notes = self._notes()
        return [
            *self._processes(),
            *self._mounts(),
            *self._loops(),
            *self._groups({what for kind, what in notes if kind == "group"}),
            *self._links({what for kind, what in notes if kind == "links"}),
            *self._files(),
        ]

    @property
    def is_removable(self) -> bool:
        """Whether the directory can be removed without loss."""
        return not any(self._files()) and not any(self._mounts())

    def _notes(self) -> list[tuple[str, str]]:
        try:
            lines = (self._place / _NOTES).read_text().splitlines()
        except FileNotFoundError:
            return []
        return [(kind, what) for kind, _, what in (line.partition(" ") for line in lines)]

    def _processes(self) -> Generator[str]:
        for path in Path("/proc").iterdir():
            if not path.name.isdigit() or int(path.name) == os.getpid():
                continue
            with contextlib.suppress(OSError):
                environment = (path / "environ").read_bytes()
                if self._mark in environment:
                    made = dict(item.partition(b"=")[::2] for item in environment.split(b"\0")).get(
                        b"PYTEST_CURRENT_TEST", b"no test"
                    )
                    yield f"process {path.name} {_command(path.name)}, by {made.decode()}"

    def _mounts(self) -> Generator[str]:
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            if (point := line.split()[4]).startswith(self._roots):
                root = line.split()[3]
                is_namespace = root.startswith(_NAMESPACES)
                yield f"namespace {root} by its mount {point}" if is_namespace else f"mount {point}"

    def _loops(self) -> Generator[str]:
        for path in Path("/sys/block").glob("loop*/loop/backing_file"):
            with contextlib.suppress(OSError):
                # An auto-clearing loop device goes with its last mount, and ours are found so:
                # it is then held by a copy of the mounts in other runs' sandboxes.
                is_cleared = path.with_name("autoclear").read_text().strip() == "1"
                file = path.read_text().strip()
                if file.startswith(self._roots) and not is_cleared:
                    yield f"loop device {path.parts[3]} of {file}"

    def _groups(self, names: set[str]) -> Generator[str]:
        for name in names:
            for path in (_GROUPS / name, *_GROUPS.glob(f"*/{name}")):
                if path.is_dir():
                    yield f"control group {path}"

    def _links(self, fabrics: set[str]) -> Generator[str]:
        devices = [path.name for path in Path("/sys/class/net").iterdir()]
        for fabric in fabrics:
            number, _, lock = fabric.partition(" ")
            links = [name for name in devices if name.startswith(f"pd{number}-")]
            if links and _is_free(Path(lock)):
                yield f"links {links}"

    def _files(self) -> Generator[str]:
        for path in self._place.iterdir():
            if path.name not in OTHERS_CACHES and not path.name.startswith((_NOTES, _LEFT)):
                # It may be removed at this moment.
                with contextlib.suppress(FileNotFoundError):
                    is_file = not path.is_dir()
                    inside = "file" if is_file else sorted(item.name for item in path.iterdir())
                    yield f"{path} ({inside})"


def _is_free(lock: Path) -> bool:
    """Whether a lock is free; another run may hold it by now."""
    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def settled(left: Callable[[], list[str]], seconds: float) -> list[str]:
    """Check until nothing is left or the time is over."""
    deadline = time.monotonic() + seconds
    while (found := left()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def _forgotten(loop: asyncio.AbstractEventLoop) -> list[asyncio.Task[Any]]:
    """Return pending tasks that were not cancelled."""
    return [
        task
        for task in asyncio.all_tasks(loop)
        # Async generators found by the collector are closed by the loop, in its own tasks.
        if inspect.iscoroutine(coro := task.get_coro())
        # Tasks of libraries' fake servers do not matter either.
        and "site-packages" not in coro.cr_code.co_filename
        and not task.cancelling()
    ]


class Watch:
    """The pytest plugin: one in each process of a run."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._leads = not hasattr(config, "workerinput")
        self._found: list[str] = []
        self._tasks: list[str] = []
        if self._leads:
            # Before any worker starts: all inherit it.
            usual = tempfile.gettempdir()
            os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", usual)
            self._place = Path(tempfile.mkdtemp(prefix="pt", dir=usual))
            self._place.chmod(0o1777)  # Nodes of other users have files there, too.
            os.environ["TMPDIR"] = tempfile.tempdir = str(self._place)
        else:
            self._place = Path(tempfile.gettempdir())
        self._baseline = Baseline()
        self._watch_tasks()

    def _watch_tasks(self) -> None:
        """Record tasks that are pending when a loop is closed: they never finish."""
        cancel_all: Any = asyncio.runners._cancel_all_tasks

        def noting(loop: asyncio.AbstractEventLoop) -> None:
            test = os.environ.get("PYTEST_CURRENT_TEST", "no test")
            for _ in range(TURNS):
                if not _forgotten(loop):
                    break
                # Tasks that only need one more step, or a cancellation, get a moment.
                loop.run_until_complete(asyncio.sleep(0))
            for task in _forgotten(loop):
                self._tasks.append(f"task {task.get_name()} {task.get_coro()!r}, by {test}")
            cancel_all(loop)

        asyncio.runners._cancel_all_tasks = noting

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Check after each test."""
        self._baseline.look(nodeid)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_sessionfinish(
        self, session: pytest.Session, exitstatus: int
    ) -> Generator[None, None, None]:
        """Check after the teardown of all fixtures."""
        yield
        seconds = PATIENCE_SECONDS if exitstatus in (0, 1, 5) else 0
        left = self._tasks + settled(self._baseline.left, seconds)
        if not self._leads:
            worker = os.environ["PYTEST_XDIST_WORKER"]
            (self._place / f"{_LEFT}-{worker}").write_text("\n".join(left))
            return
        for file in sorted(self._place.glob(f"{_LEFT}-*")):
            worker = file.name.rpartition("-")[2]
            left += [f"{worker}: {line}" for line in file.read_text().splitlines()]
        tests = self._config._tmp_path_factory.getbasetemp()  # pyright: ignore[reportAttributeAccessIssue]
        machine = Machine(self._place, tests)
        left += settled(machine.left, seconds)
        if left:
            self._found = left
            session.exitstatus = max(session.exitstatus, pytest.ExitCode.TESTS_FAILED)
        if machine.is_removable:
            shutil.rmtree(self._place)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Report the leaks."""
        if self._found:
            terminalreporter.section("left behind", red=True, bold=True)
            for line in self._found:
                terminalreporter.line(line)
