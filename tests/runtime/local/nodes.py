"""Real node processes for tests: started, killed, and checked for leaks.

Each node has its own fabric number and state directory, so that several can run concurrently.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import httptools
import msgspec
import pytest
import uvloop

import paddock
from paddock.kit.errors import PaddockError
from paddock.runtime.local.driver import LocalRuntime
from paddock.runtime.local.node.records import StateDirectory
from paddock.runtime.port import Blueprint
from tests.fabrics import usable_numbers
from tests.leaks import note_node

ROOTLESS_ID = 12345


_OWN_MOUNTS = ("devices", "layers", "storage/pool", "views")
"""Mount points of the node itself in its state directory."""
_NUMBERS = usable_numbers(range(10, 40))
_turns = itertools.cycle(range(len(_NUMBERS)))
_in_use: dict[int, int] = {}
"""Numbers used by this process, each with the lock that reserves it on this machine."""


def _lock_file(number: int) -> Path:
    """Return the lock file of a number, shared by all test runs on this machine."""
    return Path(f"/tmp/paddock-test-fabric-{number}.lock")


def fabric_number() -> int:
    """Reserve a fabric number that no other test node on this machine uses."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    for _ in _NUMBERS:
        number = _NUMBERS[(int(worker) * 5 + next(_turns)) % len(_NUMBERS)]
        lock = os.open(_lock_file(number), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        _in_use[number] = lock
        return number
    pytest.fail(f"all {len(_NUMBERS)} networks for tests on this machine are in use")


def release_fabric_number(number: int) -> None:
    """Release a fabric number."""
    os.close(_in_use.pop(number))


class TestNode:
    """A node process and a driver connected to it."""

    __test__ = False

    def __init__(self, *arguments: str, rootless: bool = False, state: str = "n") -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="pdk"))
        self.state = self.directory / state
        self.socket = self.directory / "n.sock"
        self.rootless = rootless
        self.number = fabric_number()
        note_node(self.state, _lock_file(self.number), self.number)
        self._arguments = list(arguments)
        self._process: subprocess.Popen[bytes] | None = None
        self.runtime = LocalRuntime(self.socket)
        self.log = self.directory / "node.log"
        self.prelude = ""
        """Python code to run in the node process before the node."""
        self.shared: dict[str, str] = {}
        """Uids of sandboxes that several tests use, by how they were created."""

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        command = [
            sys.executable, "-m", "paddock.runtime.local.node.process", "--state", str(self.state),
            "--socket", str(self.socket), "--purge-on-exit",
            "--host-path=/tmp", *self._arguments,
        ]  # fmt: skip
        if self.prelude:
            module = "paddock.runtime.local.node.process"
            main = f"import sys; from {module} import main; main(sys.argv[1:])"
            command[1:3] = ["-c", f"{self.prelude}\n{main}"]
        environment = dict(os.environ)
        if self.rootless:
            os.chown(self.directory, ROOTLESS_ID, ROOTLESS_ID)
            command = [
                "setpriv", "--reuid", str(ROOTLESS_ID), "--regid", str(ROOTLESS_ID),
                "--clear-groups", runnable_python(), *command[1:], "--network", "none",
            ]  # fmt: skip
            environment["PYTHONPATH"] = importable_code(self.directory / "code")
        else:
            command += ["--network", str(self.number)]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment
            )
        await self.wait_until_it_serves()

    async def wait_until_it_serves(self, seconds: float = 60) -> None:
        async def answers() -> bool:
            assert self._process is not None
            if self._process.poll() is not None:
                pytest.fail(f"the node ended:\n{self.log.read_text()[-3000:]}")
            with contextlib.suppress(PaddockError):
                await self.runtime._client.call("facts")
                return True
            return False

        await eventually(answers, seconds=seconds)

    async def facts(self) -> dict:
        return await self.runtime._call("facts", kind=dict)

    def kill(self) -> None:
        """Send SIGKILL and reap the process."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    async def wait_until_it_ends(self, seconds: float = 30) -> None:
        """Wait for the exit of the node process."""
        assert self._process is not None
        await asyncio.to_thread(self._process.wait, seconds)

    async def stop(self) -> None:
        """Stop the node with SIGTERM, check that nothing is left, and remove its directory."""
        if self._process is None or self._process.poll() is not None:
            await self.start()
        assert self._process is not None
        self.runtime.close()
        self._process.send_signal(signal.SIGTERM)
        try:
            code = await asyncio.to_thread(self._process.wait, 60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            pytest.fail(f"the node does not end:\n{self.log.read_text()[-3000:]}")
        assert code == 0, self.log.read_text()[-3000:]
        # Orphans of a killed node are reaped by the machine's init after a moment.
        await eventually(lambda: not any(traces(self.state, self.number).values()))
        shutil.rmtree(self.directory)
        release_fabric_number(self.number)


def importable_code(place: Path) -> str:
    """Return a PYTHONPATH that an unprivileged user can read; a copy if the checkout is private."""
    source = Path(paddock.__file__).parents[1]
    packages = [Path(path) for path in sys.path if path.endswith("site-packages")]
    ways = [path for start in (source / "paddock", *packages) for path in (start, *start.parents)]
    if all(path.stat().st_mode & 0o005 == 0o005 for path in ways):
        return os.pathsep.join(map(str, (source, *packages)))
    if not place.exists():
        for module in (
            paddock,
            msgspec,
            uvloop,
            httptools,
        ):  # everything that a node and envd import
            package = Path(str(module.__file__)).parent
            shutil.copytree(package, place / package.name)
        subprocess.run(["chmod", "-R", "a+rX", str(place)], check=True)
    return str(place)


def runnable_python() -> str:
    """Return a Python of this version that an unprivileged user can run."""
    for candidate in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        # Started twice: setpriv's own exec still has more permissions.
        version = f"import sys; sys.exit(sys.version_info[:2] != {sys.version_info[:2]!r})"
        again = f"[{candidate!r}, '-c', {version!r}]"
        check = f"import subprocess, sys; sys.exit(subprocess.call({again}))"
        done = subprocess.run(
            ["setpriv", "--reuid", str(ROOTLESS_ID), "--clear-groups", "--regid",
             str(ROOTLESS_ID), candidate, "-c", check], capture_output=True, check=False,
        )  # fmt: skip
        if done.returncode == 0:
            return candidate
    pytest.skip("no Python of this version can be run by other users")


async def eventually(check, *, seconds: float = 20, pause: float = 0.02):
    """Poll until a check returns a true value; return that value."""
    deadline = asyncio.get_running_loop().time() + seconds
    while True:
        result = check()
        if asyncio.iscoroutine(result):
            result = await result
        if result:
            return result
        if asyncio.get_running_loop().time() > deadline:
            raise AssertionError(f"did not happen within {seconds} s: {check}")
        await asyncio.sleep(pause)


async def wait_for_warm(node: TestNode, least: int = 1) -> int:
    """Wait for warm sandboxes of the `host` image; return their number.

    The node keeps the most requested kind warm, and other tests may have requested another.
    """

    async def are_there() -> int:
        facts = await node.facts()
        if (facts["warm_image"], facts["warm_privileges"]) != ("host", "sudo"):
            await node.runtime.create(Blueprint(uid="forerunner", image="host"))
            await node.runtime.destroy("forerunner")
            return 0
        return facts["warm_of_that_kind"] if facts["warm_of_that_kind"] >= least else 0

    # The first sandbox of a node takes long: all software of the machine is scanned.
    return await are_there() or await eventually(are_there, seconds=60)


async def wait_for_full_stock(node: TestNode) -> None:
    """Wait until the warm stock is full."""

    async def is_full() -> bool:
        facts = await node.facts()
        return (facts["warm"], facts["warm_sandboxes"]) == (8, 6)

    await wait_for_warm(node, 6)
    await eventually(is_full, seconds=60)


async def envd_of(node: TestNode, uid: str, *, other_than: int | None = None) -> int:
    """Return the pid of a sandbox's envd.

    envd may serve calls before the node has recorded its process.
    """

    async def found() -> int | None:
        pid = (await node.facts())["envds"].get(uid)
        return pid if pid != other_than else None

    return await eventually(found)


def resource_name_of(node: TestNode, uid: str) -> str:
    """Read the resource name of a sandbox's record, as the next node process would."""
    records = dict(StateDirectory(node.state).read_all())
    return records[uid].resource_name


def traces(state: Path, number: int) -> dict[str, list[str]]:
    """Return what exists of a node: mounts, cgroups, links, processes, addresses."""
    node_id = hashlib.sha256(str(state.absolute()).encode()).hexdigest()[:8]
    mounted = Path("/sys/fs/cgroup")
    groups = [
        str(path)
        for mount in (mounted, *mounted.iterdir())
        for path in (mount / f"paddock-{node_id}").glob("s*")
        if path.is_dir()
    ]
    devices = (path.name for path in Path("/sys/class/net").iterdir())
    links = [name for name in devices if name.startswith(f"pd{number}-")]
    mounts = [
        line.split()[4]
        for line in Path("/proc/self/mountinfo").read_text().splitlines()
        if line.split()[4].startswith(str(state))
    ]
    addresses = {path.name.partition("@")[0] for path in (state / "net").glob("*.json")}
    return {
        "groups": groups,
        "links": links,
        "mounts": mounts,
        "processes": inits(node_id),
        "addresses": sorted(addresses),
    }


def unexpected_traces(state: Path, number: int, facts: dict) -> dict[str, tuple[int, int]]:
    """Compare what exists of a node without sandboxes with its own facts.

    Return the differences: the actual and the expected number by kind.
    """
    found = traces(state, number)
    own = {str(state / path) for path in _OWN_MOUNTS}
    warm, sandboxes = facts["warm"], facts["warm_sandboxes"]
    counts = {
        "groups": (len({path.rsplit("/", 1)[1] for path in found["groups"]}), warm),
        "processes": (len(found["processes"]), warm),
        "links": (len(found["links"]), sandboxes),
        "addresses": (len(found["addresses"]), sandboxes),
        "mounts": (len(set(found["mounts"]) - own), 0),
    }
    return {kind: (there, wanted) for kind, (there, wanted) in counts.items() if there != wanted}


def inits(node_id: str) -> list[str]:
    """Return the pids of all processes in the node's cgroups."""
    found = []
    for path in Path("/proc").iterdir():
        if not path.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            if f"/paddock-{node_id}/" in (path / "cgroup").read_text():
                found.append(path.name)
    return found
