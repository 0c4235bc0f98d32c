"""`up`, `down`, `status`, `logs` and `image` with real processes, as somebody at a machine."""

import contextlib
import os
import pty
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.cli.conftest import PADDOCK, Cli
from tests.leaks import note_node
from tests.ports import free_ports
from tests.runtime.local.nodes import traces

pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.timeout(300),
    pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes with a network need root"),
]

START_SECONDS = 100


class Machine(Cli):
    """An installation that nothing has started yet."""

    def __init__(self, **settings: str) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="pdm"))
        port, api_port = free_ports(2)
        self.state = self.home / "state"
        note_node(self.state / "node")
        super().__init__(
            {
                **{key: value for key, value in os.environ.items() if "PADDOCK" not in key},
                "PADDOCK_STATE_DIR": str(self.state),
                "PADDOCK_RUN_DIR": str(self.home / "run"),
                "PADDOCK_PORT": str(port),
                "PADDOCK_API_PORT": str(api_port),
                "PADDOCK_POOL_SIZE": "1",
                "PADDOCK_GATEWAYS": "1",
                "NO_COLOR": "1",
                "COLUMNS": "100",
                **settings,
            }
        )

    @property
    def number(self) -> int:
        """Of its network on this machine."""
        return int((self.state / "node" / "net" / "number").read_text())

    @property
    def pid(self) -> int:
        """Of its supervisor."""
        return int((self.home / "run" / "paddock.pid").read_text())

    def python(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Start one of its processes by hand."""
        return subprocess.run(
            [sys.executable, *arguments],
            env=self.environment | environment,
            capture_output=True,
            text=True,
            timeout=START_SECONDS,
            check=False,
        )

    def subnet(self, sandbox_id: str) -> str:
        """The first half of a sandbox's address."""
        words = self("sandbox", "exec", sandbox_id, "hostname -I").split()
        assert words, "it has no address"
        return words[0].rsplit(".", 2)[0]

    def remove(self) -> None:
        """Leave nothing of it on the machine."""
        with contextlib.suppress(FileNotFoundError):
            number = self.number
            done = self.run("down", "--purge", "--yes")
            assert done.returncode == 0, done.stderr
            # Orphans wait for the machine's first process to reap them.
            until(lambda: not any(traces(self.state / "node", number).values()))
        shutil.rmtree(self.home)


def until(check, seconds: float = START_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.05)


@pytest.fixture
def machine() -> Generator[Machine]:
    made = Machine()
    yield made
    made.remove()


@pytest.fixture(scope="module")
def running() -> Generator[Machine]:
    """One that is up, for tests that leave it so: starting takes seconds of a processor."""
    made = Machine()
    try:
        made.started = made.run("up", "--detach")
        yield made
    finally:
        made.remove()


def test_where_nothing_runs_every_command_says_so(machine: Machine) -> None:
    before = machine.run("status")
    assert before.returncode == 1
    assert "problem    it does not run; `paddock up` starts it\n" in before.stdout
    assert machine("down") == "Paddock does not run here\n"
    assert machine("down", "--purge") == "there is nothing to purge\n"
    assert machine.run("logs").stderr.startswith("error: there is no log of 'control'")


def test_up_tells_how_it_goes_and_how_to_use_it(running: Machine) -> None:
    assert running.started.returncode == 0, running.started.stderr
    assert running.started.stdout == ""
    lines = running.started.stderr.splitlines()
    assert lines[:3] == ["starting node", "starting control", "starting gateway-0"]
    assert any(line.startswith("warming sandboxes: ") for line in lines)
    assert any(line.startswith("  export E2B_API_KEY=e2b_") for line in lines)
    [address] = [line for line in lines if line.startswith("  export E2B_API_URL=")]
    assert address.endswith(f" E2B_DOMAIN=localhost:{running.environment['PADDOCK_PORT']}")
    # The command is said so that any shell finds it.
    [said] = re.findall(r"stop with `(.*paddock) down`", running.started.stderr)
    assert shutil.which(said, path=running.environment["PATH"])


def test_status_and_logs_tell_of_what_runs(running: Machine) -> None:
    until(lambda: running.json("status")["pools"]["default/base"]["available"] == 1)
    shown = running("status")
    assert f"process    {running.pid}\n" in shown
    assert Path(f"/proc/{running.pid}").exists()
    assert "default/base: 1 ready" in shown
    assert "node serves" in running("logs", "node")
    assert len(running.json("logs", "control", "--lines", "3")) == 3
    assert "there are: control, gateway-0, node, up" in running.run("logs", "nobody").stderr


def test_a_second_one_on_the_same_state_is_refused_and_harms_nothing(running: Machine) -> None:
    box = running("sandbox", "create", "--timeout", "600").strip()
    running("sandbox", "exec", box, "echo mine > mine.txt")
    pid = running.pid
    again = running.run("up", "--detach")
    assert again.returncode == 1
    assert f"runs already (process {pid})" in again.stderr
    assert "hint:" in again.stderr
    # Nor does it help to go round the supervisor: the state itself is taken.
    node = ["-m", "paddock.runtime.local.node.process", "--state", str(running.state / "node")]
    refused = running.python(*node, "--socket", str(running.home / "other.sock"))
    assert refused.returncode == 1
    assert f"another node uses {running.state}/node" in refused.stderr
    refused = running.python("-m", "paddock.app", "control", PADDOCK_API_PORT=str(*free_ports(1)))
    assert refused.returncode == 1
    assert f"the store {running.state}/store.db is in use by process" in refused.stderr
    assert "hint: stop that process" in refused.stderr
    # The first goes on as if nothing had been asked.
    assert running.pid == pid
    assert running("sandbox", "exec", box, "cat mine.txt") == "mine\n"
    running("sandbox", "kill", box)


def test_after_a_kill_the_next_takes_everything_over_at_once(running: Machine) -> None:
    box = running("sandbox", "create", "--timeout", "600").strip()
    running("sandbox", "exec", box, "nohup sleep 1000 >/dev/null 2>&1 & echo kept > kept.txt")
    number, subnet = running.number, running.subnet(box)
    killed = running.pid
    os.kill(killed, signal.SIGKILL)
    # What the killed one had started is still about to end, and is waited for.
    up = running.json("up", "--detach")
    assert up["url"].endswith(running.environment["PADDOCK_PORT"])
    assert up["pid"] == running.pid != killed
    assert running("sandbox", "exec", box, "cat kept.txt; pgrep -c sleep") == "kept\n1\n"
    # What outlives the node has its addresses: its network keeps its number.
    assert (running.number, running.subnet(box)) == (number, subnet)
    running("sandbox", "kill", box)


def test_two_installations_on_one_machine_have_networks_of_their_own(
    running: Machine, machine: Machine
) -> None:
    started = machine.run("--output", "json", "up", "--detach")
    assert started.returncode == 0, started.stderr
    # One line for programs, and nothing else.
    assert started.stdout.count("\n") == 1
    assert started.stderr == ""
    boxes = [one("sandbox", "create").strip() for one in (running, machine)]
    assert running.subnet(boxes[0]) != machine.subnet(boxes[1])
    assert running.number != machine.number
    running("sandbox", "kill", boxes[0])
    # Sandboxes outlive the rest, and are there for the next `up`.
    assert machine("down") == "stopped\n"
    assert machine.run("status").returncode == 1
    assert traces(machine.state / "node", machine.number)["processes"]
    # Purged, nothing stays of it; the other is left alone.
    number = machine.number
    unasked = machine.run("down", "--purge")
    assert unasked.returncode == 1
    assert "--yes" in unasked.stderr
    assert machine("down", "--purge", "--yes") == f"purged {machine.state}\n"
    assert not machine.state.exists()
    assert not (machine.home / "run").exists()
    until(lambda: not any(traces(machine.state / "node", number).values()))
    assert running.json("status")["answers"]


def test_a_backup_brings_back_everything_but_what_was_in_sandboxes(machine: Machine) -> None:
    machine("up", "--detach")
    machine("teams", "quota", "research", "--sandboxes", "7")
    keys = machine.json("keys", "ls")
    box = machine("sandbox", "create", "--timeout", "600").strip()
    machine("down")
    archive = machine.home / "backup.tar.gz"
    kept = ("store.db", "secrets.json")
    subprocess.run(["tar", "-C", machine.state, "-czf", archive, *kept], check=True)
    # Somebody uses what was in stock: it must not be given to the next as new.
    machine("up", "--detach")
    used = machine("sandbox", "create", "--timeout", "600").strip()
    machine("sandbox", "exec", used, "echo secret > secret.txt")
    machine("teams", "quota", "research", "--sandboxes", "8")
    machine("down", "--purge", "--yes")
    machine.state.mkdir(mode=0o700)
    subprocess.run(["tar", "-C", machine.state, "-xzf", archive], check=True)
    machine("up", "--detach")
    assert [item["id"] for item in machine.json("keys", "ls")] == [item["id"] for item in keys]
    [team] = [item for item in machine.json("teams", "ls") if item["name"] == "research"]
    assert team["quota"]["limits"][0]["limit"] == 7
    until(lambda: re.search(rf"Failed +{box}", machine("get", "sandboxes")))
    assert machine.run("sandbox", "exec", used, "true").returncode != 0
    fresh = machine("sandbox", "create", "--timeout", "600").strip()
    assert machine("sandbox", "exec", fresh, "ls; echo fine") == "fine\n"


def test_purging_removes_nothing_that_is_not_paddocks(machine: Machine) -> None:
    machine.state.mkdir()
    (machine.state / "thesis.tex").write_text("years of work")
    refused = machine.run("down", "--purge", "--yes")
    assert refused.returncode == 1
    assert "does not look like a state directory of Paddock" in refused.stderr
    assert (machine.state / "thesis.tex").read_text() == "years of work"


def test_a_port_that_is_taken_is_named_at_once(machine: Machine) -> None:
    port = machine.environment["PADDOCK_PORT"]
    with socket.create_server(("127.0.0.1", int(port))):
        refused = machine.run("up")
    assert refused.returncode == 1
    assert f"another process listens on 127.0.0.1:{port}" in refused.stderr
    assert "choose another port with --port" in refused.stderr


def test_at_a_terminal_a_bar_shows_how_the_pool_warms_and_ctrl_c_stops(machine: Machine) -> None:
    machine.environment |= {"PADDOCK_RUNTIME": "simulated", "TERM": "xterm"}
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [str(PADDOCK), "up"],
        env=machine.environment,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    seen = b""

    def read() -> None:
        nonlocal seen
        if select.select([ours], [], [], 0.2)[0]:
            with contextlib.suppress(OSError):  # the far side has gone
                seen += os.read(ours, 65536)

    def shows(text: bytes) -> bool:
        read()
        return text in seen

    try:
        until(lambda: shows(b"Paddock is up"))
        assert b"warming sandboxes" in seen
        assert b"1/1" in seen
        process.send_signal(signal.SIGINT)
        until(lambda: shows(b"stopped"))
        assert process.wait(90) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(ours)


def test_images_are_listed_imported_and_deleted(machine: Machine, tmp_path: Path) -> None:
    root = tmp_path / "tiny"
    (root / "bin").mkdir(parents=True)
    (root / "bin" / "hello").write_text("#!/bin/sh\necho hello\n")
    assert machine("image", "import", str(root), "--name", "tiny").startswith("imported tiny")
    assert "tiny:latest" in machine("image", "ls")
    assert "tiny:latest" in [item["name"] for item in machine.json("image", "ls")]
    assert machine("image", "rm", "tiny") == "deleted tiny\n"
    gone = machine.run("image", "rm", "tiny")
    assert gone.returncode == 1
    assert "there is no image 'tiny'" in gone.stderr
    missing = machine.run("image", "import", str(tmp_path / "nothing.tar"))
    assert missing.returncode == 2
