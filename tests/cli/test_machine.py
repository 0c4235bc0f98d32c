"""`up`, `down`, `status`, `logs` and `image` with real processes."""

import contextlib
import json
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
import tomllib
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.api.kube.kubectl import binaries
from tests.cli.conftest import PADDOCK, Cli
from tests.cluster.certificates import Authority
from tests.leaks import note_node
from tests.newcomer.blocks import blocks
from tests.ports import free_ports
from tests.runtime.local.nodes import traces

pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.timeout(300),
    pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes with a network need root"),
]

START_SECONDS = 100


class Machine(Cli):
    """An installation that is not started."""

    def __init__(self, **settings: str) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="pdm"))
        port, api_port, kube_port = free_ports(3)
        self.state = self.home / "state"
        note_node(self.state / "node")
        super().__init__(
            {
                **{key: value for key, value in os.environ.items() if "PADDOCK" not in key},
                "PADDOCK_STATE_DIR": str(self.state),
                "PADDOCK_RUN_DIR": str(self.home / "run"),
                "PADDOCK_PORT": str(port),
                "PADDOCK_API_PORT": str(api_port),
                "PADDOCK_KUBE_PORT": str(kube_port),
                "PADDOCK_POOL_SIZE": "1",
                "PADDOCK_GATEWAYS": "1",
                "NO_COLOR": "1",
                "COLUMNS": "100",
                **settings,
            }
        )

    @property
    def number(self) -> int:
        """The number of its network on this machine."""
        return int((self.state / "node" / "net" / "number").read_text())

    @property
    def pid(self) -> int:
        """The process id of its supervisor."""
        return int((self.home / "run" / "paddock.pid").read_text())

    def python(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run one of its processes directly."""
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
        assert words, "the sandbox has no address"
        return words[0].rsplit(".", 2)[0]

    def remove(self) -> None:
        """Remove everything of it from the machine."""
        with contextlib.suppress(FileNotFoundError):
            number = self.number
            done = self.run("down", "--purge", "--yes")
            assert done.returncode == 0, done.stderr
            # Orphans remain until the init process of the machine reaps them.
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
    """A running installation, shared by tests that leave it running, because a start is slow."""
    made = Machine()
    try:
        made.started = made.run("up", "--detach")
        yield made
    finally:
        made.remove()


def test_commands_report_that_paddock_is_not_running(machine: Machine) -> None:
    before = machine.run("status")
    assert before.returncode == 1
    assert "problem    Paddock is not running; `paddock up` starts it\n" in before.stdout
    assert machine("down") == "Paddock is not running\n"
    assert machine("down", "--purge") == "nothing to purge\n"
    assert machine.run("logs").stderr.startswith("error: process 'control' has no log")


def test_up_prints_progress_and_how_to_connect(running: Machine) -> None:
    assert running.started.returncode == 0, running.started.stderr
    assert running.started.stdout == ""
    lines = running.started.stderr.splitlines()
    assert lines[:3] == ["starting node", "starting control", "starting gateway-0"]
    assert any(line.startswith("warming sandboxes: ") for line in lines)
    assert any(line.startswith("  export E2B_API_KEY=e2b_") for line in lines)
    [address] = [line for line in lines if line.startswith("  export E2B_API_URL=")]
    assert address.endswith(f" E2B_DOMAIN=localhost:{running.environment['PADDOCK_PORT']}")
    # The printed command is found by any shell.
    [command] = re.findall(r"stop with `(.*paddock) down`", running.started.stderr)
    assert shutil.which(command, path=running.environment["PATH"])


def test_status_and_logs_show_running_processes(running: Machine) -> None:
    until(lambda: running.json("status")["pools"]["default/base"]["available"] == 1)
    shown = running("status")
    assert f"process    {running.pid}\n" in shown
    assert Path(f"/proc/{running.pid}").exists()
    assert "default/base: 1 ready" in shown
    assert "node is serving" in running("logs", "node")
    assert len(running.json("logs", "control", "--lines", "3")) == 3
    assert (
        "processes with a log: control, gateway-0, node, up" in running.run("logs", "nobody").stderr
    )


def test_kubectl_uses_the_kubeconfig_of_this_machine(running: Machine, tmp_path: Path) -> None:
    file = Path(running("kubeconfig").strip())
    assert file == running.state / "kubeconfig"
    assert file.stat().st_mode & 0o777 == 0o600
    other = tmp_path / "other"
    assert running.json("kubeconfig", "--file", str(other)) == {"file": str(other)}
    assert other.read_text() == file.read_text()

    found = binaries()
    assert found, "there is no kubectl here: scripts/fetch-kubectl gets one"
    for binary in found:
        shown = subprocess.run(
            [binary, "--kubeconfig", file, "get", "sandboxpools", "-o", "name"],
            capture_output=True,
            text=True,
            check=False,
            env=running.environment | {"HOME": str(tmp_path)},
        )
        assert shown.stdout == "sandboxpool.paddock.dev/base\n", shown.stderr


def test_kubectl_uses_an_api_key_with_the_rights_of_its_role(
    running: Machine, tmp_path: Path
) -> None:
    box = running("sandbox", "create", "--timeout", "600").strip()
    key = running("keys", "create", "robot", "--team", "red", "--role", "member").strip()
    with_key = {**running.environment, "E2B_API_KEY": key}
    member = Cli(with_key)
    own = member("sandbox", "create", "--timeout", "600").strip()
    file = Path(member("kubeconfig", "--key").strip())
    assert file == running.state / "kubeconfig-red"
    assert file.stat().st_mode & 0o777 == 0o600
    assert key in file.read_text()

    def kubectl(binary: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [binary, "--kubeconfig", file, *arguments],
            capture_output=True,
            text=True,
            check=False,
            env=with_key | {"HOME": str(tmp_path)},
        )

    for binary in binaries():
        ids = "jsonpath={.items[*].spec.claim.sandboxId}"
        assert kubectl(binary, "get", "sbx", "-A", "-o", ids).stdout == own
        assert kubectl(binary, "-n", "default", "get", "sbx", "-o", ids).stdout == own
        assert "Forbidden" in kubectl(binary, "-n", "default", "get", "sbp").stderr
        for verb, kind, answer in (
            ("list", "sandboxes", "yes"),
            ("delete", "sandboxclaims", "yes"),
            ("create", "sandboxclaims", "yes"),
            ("patch", "sandboxes", "yes"),
            ("create", "sandboxpools", "no"),
            ("create", "sandboxes", "no"),
            ("get", "secrets", "no"),
            ("*", "*", "no"),
        ):
            said = kubectl(binary, "auth", "can-i", verb, kind)
            assert said.stdout.split()[:1] == [answer], (verb, kind, said.stderr)
        listed = kubectl(binary, "auth", "can-i", "--list").stdout
        assert "sandboxes.paddock.dev" in listed
        assert "*.*" not in listed
    assert box != own
    running("sandbox", "kill", box)
    member("sandbox", "kill", own)


def test_kubectl_claims_pauses_and_resumes_with_an_api_key_within_its_quota(
    running: Machine, tmp_path: Path
) -> None:
    key = running("keys", "create", "bot", "--team", "green", "--role", "member").strip()
    running("teams", "quota", "green", "--sandboxes", "1")
    with_key = {**running.environment, "E2B_API_KEY": key}
    file = Path(Cli(with_key)("kubeconfig", "--key").strip())

    def kubectl(*arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [binaries()[-1], "--kubeconfig", file, *arguments],
            capture_output=True,
            text=True,
            check=False,
            input=given,
            env=with_key | {"HOME": str(tmp_path)},
        )

    claim = {
        "apiVersion": "paddock.dev/v1alpha1",
        "kind": "SandboxClaim",
        "metadata": {"name": "two"},
        "spec": {"templateName": "base", "replicas": 2, "claimTimeoutSeconds": 10},
    }
    for way in ((), ("--server-side",)):
        applied = kubectl("apply", *way, "-f", "-", given=json.dumps(claim))
        assert applied.returncode == 0, applied.stderr
    waited = kubectl("wait", "--for=condition=Failed", "sandboxclaim/two", "--timeout=60s")
    assert waited.returncode == 0, waited.stderr + kubectl("get", "sbc", "two", "-o", "yaml").stdout
    [name] = kubectl("get", "sbx", "-o", "jsonpath={.items[*].metadata.name}").stdout.split()
    for paused, phase in (("true", "Paused"), ("false", "Running")):
        change = f'{{"spec": {{"paused": {paused}}}}}'
        patched = kubectl("patch", "sandbox", name, "--type=merge", "-p", change)
        assert patched.returncode == 0, patched.stderr
        # Older ones have no `kubectl wait --for=jsonpath`.
        read = ("get", "sandbox", name, "-o", "jsonpath={.status.phase}")
        until(lambda read=read, phase=phase: kubectl(*read).stdout == phase)
    for change in ('{"spec": {"claim": null}}', '{"metadata": {"finalizers": null}}'):
        refused = kubectl("patch", "sandbox", name, "--type=merge", "-p", change)
        assert "Forbidden" in refused.stderr, refused.stdout
    assert kubectl("delete", "sandbox", name, "--wait=false").returncode == 0


def test_an_address_without_tls_is_refused(machine: Machine) -> None:
    machine.environment["PADDOCK_HOST"] = "0.0.0.0"
    refused = machine.run("up", "--detach")
    assert refused.returncode == 1
    assert "host: other machines would reach 0.0.0.0 without TLS" in refused.stderr
    assert "hint: keep it on 127.0.0.1" in refused.stderr


def test_a_second_installation_on_the_same_state_is_refused_without_harm(running: Machine) -> None:
    box = running("sandbox", "create", "--timeout", "600").strip()
    running("sandbox", "exec", box, "echo mine > mine.txt")
    pid = running.pid
    again = running.run("up", "--detach")
    assert again.returncode == 1
    assert f"runs already (process {pid})" in again.stderr
    assert "hint:" in again.stderr
    # Processes started without the supervisor are refused, too: the state is locked.
    node = ["-m", "paddock.runtime.local.node.process", "--state", str(running.state / "node")]
    refused = running.python(*node, "--socket", str(running.home / "other.sock"))
    assert refused.returncode == 1
    assert f"another node uses {running.state}/node" in refused.stderr
    refused = running.python("-m", "paddock.app", "control", PADDOCK_API_PORT=str(*free_ports(1)))
    assert refused.returncode == 1
    assert f"the store {running.state}/store.db is in use by process" in refused.stderr
    assert "hint: stop that process" in refused.stderr
    # The first installation is not affected.
    assert running.pid == pid
    assert running("sandbox", "exec", box, "cat mine.txt") == "mine\n"
    running("sandbox", "kill", box)


def test_after_a_kill_the_next_up_adopts_everything(running: Machine) -> None:
    box = running("sandbox", "create", "--timeout", "600").strip()
    running("sandbox", "exec", box, "nohup sleep 1000 >/dev/null 2>&1 & echo kept > kept.txt")
    number, subnet = running.number, running.subnet(box)
    killed = running.pid
    os.kill(killed, signal.SIGKILL)
    # `up` waits for the ending child processes of the killed supervisor.
    up = running.json("up", "--detach")
    assert up["url"].endswith(running.environment["PADDOCK_PORT"])
    assert up["pid"] == running.pid != killed
    assert running("sandbox", "exec", box, "cat kept.txt; pgrep -c sleep") == "kept\n1\n"
    # Sandboxes that outlive the node keep their addresses: the network keeps its number.
    assert (running.number, running.subnet(box)) == (number, subnet)
    running("sandbox", "kill", box)


def test_two_installations_on_one_machine_have_separate_networks(
    running: Machine, machine: Machine
) -> None:
    started = machine.run("--output", "json", "up", "--detach")
    assert started.returncode == 0, started.stderr
    # JSON output is exactly one line.
    assert started.stdout.count("\n") == 1
    assert started.stderr == ""
    boxes = [one("sandbox", "create").strip() for one in (running, machine)]
    assert running.subnet(boxes[0]) != machine.subnet(boxes[1])
    assert running.number != machine.number
    running("sandbox", "kill", boxes[0])
    # Sandboxes survive `down`.
    assert machine("down") == "stopped\n"
    assert machine.run("status").returncode == 1
    assert traces(machine.state / "node", machine.number)["processes"]
    # A purge removes everything, and does not affect the other installation.
    number = machine.number
    unasked = machine.run("down", "--purge")
    assert unasked.returncode == 1
    assert "--yes" in unasked.stderr
    assert machine("down", "--purge", "--yes") == f"purged {machine.state}\n"
    assert not machine.state.exists()
    assert not (machine.home / "run").exists()
    until(lambda: not any(traces(machine.state / "node", number).values()))
    assert running.json("status")["answers"]


def test_up_reports_whether_its_sandboxes_are_kept(machine: Machine) -> None:
    def ended_by(*command: str) -> str:
        with subprocess.Popen(
            [PADDOCK, "up"], env=machine.environment, stderr=subprocess.PIPE, text=True
        ) as up:
            assert up.stderr is not None
            for line in up.stderr:
                if "Paddock is up" in line:
                    break
            machine(*command)
            rest = up.stderr.read()
            assert up.wait(START_SECONDS) == 0
        return rest.strip().splitlines()[-1]

    assert ended_by("down") == "stopped; sandboxes are kept for the next `paddock up`"
    number = machine.number
    assert (
        ended_by("down", "--purge", "--yes")
        == "stopped; `paddock down --purge` kills all sandboxes"
    )
    assert not machine.state.exists()
    assert not (machine.home / "run").exists()
    until(lambda: not any(traces(machine.state / "node", number).values()))


def test_a_backup_restores_everything_except_the_contents_of_sandboxes(machine: Machine) -> None:
    machine("up", "--detach")
    machine("teams", "quota", "research", "--sandboxes", "7")
    keys = machine.json("keys", "ls")
    box = machine("sandbox", "create", "--timeout", "600").strip()
    machine("down")
    archive = machine.home / "backup.tar.gz"
    keyring = machine.home / "keyring.json"
    subprocess.run(["tar", "-C", machine.state, "-czf", archive, "store.db"], check=True)
    machine("keyring", "backup", str(keyring))
    assert keyring.stat().st_mode & 0o777 == 0o600
    shown = machine("keyring", "show")
    # A warm sandbox is used: it must not be handed out again as new.
    machine("up", "--detach")
    used = machine("sandbox", "create", "--timeout", "600").strip()
    machine("sandbox", "exec", used, "echo secret > secret.txt")
    machine("teams", "quota", "research", "--sandboxes", "8")
    machine("down", "--purge", "--yes")
    machine.state.mkdir(mode=0o700)
    subprocess.run(["tar", "-C", machine.state, "-xzf", archive], check=True)
    refused = machine.run("up", "--detach")
    assert "the keyring" in refused.stderr, refused.stderr
    assert "is missing" in refused.stderr
    machine("keyring", "restore", str(keyring))
    assert machine("keyring", "show") == shown
    machine("up", "--detach")
    assert [item["id"] for item in machine.json("keys", "ls")] == [item["id"] for item in keys]
    [team] = [item for item in machine.json("teams", "ls") if item["name"] == "research"]
    assert team["quota"]["limits"][0]["limit"] == 7
    until(lambda: re.search(rf"Failed +{box}", machine("get", "sandboxes")))
    assert machine.run("sandbox", "exec", used, "true").returncode != 0
    fresh = machine("sandbox", "create", "--timeout", "600").strip()
    assert machine("sandbox", "exec", fresh, "ls; echo fine") == "fine\n"


def test_a_rotation_applies_without_a_restart_and_prune_deletes_what_nothing_needs(
    machine: Machine,
) -> None:
    machine("up", "--detach")
    box = machine("sandbox", "create", "--timeout", "600").strip()
    machine("sandbox", "exec", box, "echo mine > note.txt")
    before = machine.json("keyring", "show")
    for what in ("seed", "encryption"):
        assert "down" not in machine("keyring", "rotate", what)
    log = machine.state / "logs" / "control.log"
    for line in ("seed of tokens in use changed", "store rewritten with the encryption key in use"):
        until(lambda wanted=line: wanted in log.read_text())
    assert machine("sandbox", "exec", box, "cat note.txt") == "mine\n"
    new = machine("sandbox", "create", "--timeout", "600").strip()
    assert machine("sandbox", "exec", new, "echo fine") == "fine\n"
    assert "Paddock runs" in machine.run("keyring", "prune").stderr
    machine("down")
    pruned = machine.json("keyring", "prune")
    assert pruned["deleted"] == [f"encryption {before['encryption'][0]}"]
    assert pruned["kept"] == [f"seed {before['seed'][0]}"]
    refused = machine.run("keyring", "prune")
    assert refused.returncode == 1
    assert "1 sandboxes use it" in refused.stderr
    machine("up", "--detach")
    assert machine("sandbox", "exec", box, "cat note.txt") == "mine\n"
    machine("sandbox", "kill", box)
    machine("down")
    assert machine.json("keyring", "prune")["deleted"] == [f"seed {before['seed'][0]}"]
    machine("up", "--detach")
    assert machine("sandbox", "exec", new, "echo fine") == "fine\n"


def test_the_files_of_the_guide_for_company_networks_reach_sandboxes(
    machine: Machine, tmp_path: Path
) -> None:
    """The page's own text; only the file of the CA is another one."""
    page = "docs/how-to/company-networks.md"
    proxy, mirror = (block.text for block in blocks(page) if block.language == "toml")
    file, own = tmp_path / "paddock.toml", str(Authority(tmp_path).path)
    assert "/etc/ssl/corp-ca.pem" in proxy
    file.write_text(proxy.replace("/etc/ssl/corp-ca.pem", own))
    machine("up", "--detach")
    box = machine("sandbox", "create", "--timeout", "1800").strip()

    def restarted() -> None:
        # As on the page: sandboxes keep running.
        machine("down")
        machine("--config", str(file), "up", "--detach")

    def shows(command: str, wanted: str) -> None:
        until(lambda: machine.run("sandbox", "exec", box, command).stdout == wanted)

    restarted()
    settings = tomllib.loads(proxy)
    shows("printenv HTTP_PROXY HTTPS_PROXY", f"{settings['sandbox_http_proxy']}\n" * 2)
    shows("printenv PIP_INDEX_URL", f"{settings['sandbox_pip_index']}\n")
    shows("printenv NPM_CONFIG_REGISTRY", f"{settings['sandbox_npm_registry']}\n")
    excepted = machine("sandbox", "exec", box, "printenv NO_PROXY").strip().split(",")
    assert set(settings["sandbox_no_proxy"].split(",")) <= set(excepted)
    shows("cat /etc/paddock/ca.pem", Path(own).read_text())
    mirrors = machine("sandbox", "exec", box, "cat /etc/apt/sources.list* 2>/dev/null; true")
    assert settings["sandbox_apt_mirror"] in mirrors

    file.write_text(mirror)
    restarted()
    index = tomllib.loads(mirror)["sandbox_pip_index"]
    shows("printenv PIP_INDEX_URL HTTP_PROXY", f"{index}\n")
    shows("printenv PIP_TRUSTED_HOST", "host.paddock.internal\n")


def test_purge_refuses_a_directory_that_is_not_paddocks(machine: Machine) -> None:
    machine.state.mkdir()
    (machine.state / "thesis.tex").write_text("years of work")
    refused = machine.run("down", "--purge", "--yes")
    assert refused.returncode == 1
    assert "does not look like a state directory of Paddock" in refused.stderr
    assert (machine.state / "thesis.tex").read_text() == "years of work"


def test_a_port_in_use_is_reported_immediately(machine: Machine) -> None:
    port = machine.environment["PADDOCK_PORT"]
    with socket.create_server(("127.0.0.1", int(port))):
        refused = machine.run("up")
    assert refused.returncode == 1
    assert f"another process listens on 127.0.0.1:{port}" in refused.stderr
    assert "choose another port with --port" in refused.stderr


def test_on_a_terminal_a_bar_shows_the_warming_pool_and_ctrl_c_stops(machine: Machine) -> None:
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
            with contextlib.suppress(OSError):  # the other side has closed
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


def test_the_recipe_of_an_image_is_printed(machine: Machine, tmp_path: Path) -> None:
    printed = machine("image", "build-base", "minimal", "--print")
    assert tomllib.loads(printed)["name"] == "minimal"
    assert tomllib.loads(machine("image", "build-base", "--print"))["from"] == "minimal"
    wrong = tmp_path / "recipe.toml"
    wrong.write_text('name = "a"\nfrom = "alpine"')
    refused = machine.run("image", "build-base", "--recipe", str(wrong))
    assert f"the recipe {wrong} builds on 'alpine'" in refused.stderr
    assert "hint: `from` is one of base, minimal, or left out" in refused.stderr


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
    assert "image 'tiny' does not exist" in gone.stderr
    missing = machine.run("image", "import", str(tmp_path / "nothing.tar"))
    assert missing.returncode == 2
