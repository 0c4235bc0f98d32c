"""E2B's CLI, unmodified."""

import json
import subprocess
import time
from collections.abc import Generator

import pytest

from tests.sdk.clients import CLI, NODE

pytestmark = [pytest.mark.sdk, pytest.mark.sandbox, pytest.mark.timeout(300)]


class Cli:
    """The command `e2b`."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment

    def run(self, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(NODE), str(CLI), *arguments],
            env=self._environment,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def __call__(self, *arguments: str) -> str:
        done = self.run(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def listed(self, state: str) -> list[str]:
        found = json.loads(self("sandbox", "list", "--state", state, "--format", "json"))
        return [item["sandboxId"] for item in found]


@pytest.fixture(scope="module")
def cli(environment: dict[str, str]) -> Cli:
    if not CLI.exists() or not NODE.exists():
        pytest.skip("E2B's CLI is not installed: run scripts/install-clients")
    return Cli(environment)


@pytest.fixture
def box(cli: Cli) -> Generator[str]:
    output = cli("sandbox", "create", "--detach", "base")
    sandbox_id = next(word for line in output.splitlines() for word in line.split() if is_id(word))
    yield sandbox_id
    cli.run("sandbox", "kill", sandbox_id)


def is_id(word: str) -> bool:
    return len(word) == 21 and word.startswith("i") and word.isalnum()


def test_a_sandbox_is_created_listed_described_and_killed(cli: Cli, box: str) -> None:
    assert box in cli.listed("running")
    info = json.loads(cli("sandbox", "info", "--format", "json", box))
    assert (info["sandboxId"], info["state"]) == (box, "running")
    assert box in cli("sandbox", "kill", box)
    assert box not in cli.listed("running")


def test_commands_run_with_their_output_and_exit_code(cli: Cli, box: str) -> None:
    done = cli.run("sandbox", "exec", "-e", "COLOUR=blue", box, "echo $COLOUR; echo no >&2; exit 3")
    assert (done.returncode, done.stdout, done.stderr) == (3, "blue\n", "no\nexit status 3\n")
    assert cli("sandbox", "exec", "-u", "root", "-c", "/", box, "whoami; pwd") == "root\n/\n"


def test_a_sandbox_is_paused_and_resumed(cli: Cli, box: str) -> None:
    cli("sandbox", "exec", box, "echo kept > kept.txt")
    cli("sandbox", "pause", box)
    assert box in cli.listed("paused")
    cli("sandbox", "resume", box)
    assert cli("sandbox", "exec", box, "cat kept.txt") == "kept\n"


def test_logs_and_metrics_are_shown(cli: Cli, box: str) -> None:
    cli("sandbox", "exec", box, "echo hello")
    lines = cli("sandbox", "logs", "--format", "json", box).splitlines()
    entries = [json.loads(line) for line in lines if line.startswith("{")]
    assert any("handed out" in json.dumps(entry) for entry in entries), lines
    deadline = time.monotonic() + 90
    while "{" not in (output := cli("sandbox", "metrics", "--format", "json", box)):
        assert time.monotonic() < deadline, output
    sample = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    assert sample["cpuCount"] == 2


def test_templates_are_listed(cli: Cli) -> None:
    found = json.loads(cli("template", "list", "--format", "json"))
    assert "base" in [item["templateID"] for item in found]


def test_a_missing_sandbox_is_an_error(cli: Cli) -> None:
    done = cli.run("sandbox", "info", "i" + "0" * 20)
    assert done.returncode != 0
    assert "wasn't found" in done.stderr
