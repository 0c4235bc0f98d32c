"""`paddock task-executor`: host mode, sidecar mode, restarts, and errors at startup."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError

import pytest

from paddock.envd.tasks.executor import ExecutorOptions, check
from paddock.envd.tasks.task_launcher import ExecutorError
from tests.ports import free_port

pytestmark = pytest.mark.timeout(120)

PADDOCK = Path(sys.executable).with_name("paddock")


class Executor:
    """A real executor process."""

    def __init__(self, directory: Path, **env: str) -> None:
        self.port = free_port()
        self.environment = {
            **os.environ,
            "DATA_DIR": str(directory / "tasks"),
            "LISTEN_ADDR": f"127.0.0.1:{self.port}",
            "TASK_EXECUTOR_TOKEN": "secret",
            **env,
        }
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen([PADDOCK, "task-executor"], env=self.environment)
        eventually(self.is_up, 60)

    def is_up(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, "the executor did not start"
        try:
            return self.call("GET", "/health") == {"status": "healthy"}
        except OSError:
            return False

    def call(self, method: str, path: str, body=None, token: str = "secret"):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data,
            {"X-Access-Token": token},
            method=method,
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def final(self, name: str):
        def over():
            status = self.call("GET", f"/tasks/{name}")["processStatus"]
            return status if status["isFinal"] else None

        return eventually(over, 60)

    def end(self, number: int = signal.SIGTERM) -> None:
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait(20)
            self.process = None


def eventually(check, seconds: float):
    deadline = time.monotonic() + seconds
    while not (found := check()):
        assert time.monotonic() < deadline, "timeout"
        time.sleep(0.02)
    return found


@pytest.fixture
def executor(tmp_path: Path) -> Iterator[Executor]:
    made = Executor(tmp_path)
    made.start()
    yield made
    made.end(signal.SIGKILL)


def script(name: str, text: str, **process) -> dict:
    return {"name": name, "process": {"command": ["/bin/sh", "-c", text], **process}}


def lives(pid: int) -> bool:
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def test_a_task_runs_on_the_host_with_its_output_and_exit_code(executor: Executor) -> None:
    env = [{"name": "WHO", "value": "host"}]
    executor.call("POST", "/setTasks", [script("t", "echo hello $WHO; exit 3", env=env)])
    status = executor.final("t")
    assert status["terminated"]["exitCode"] == 3
    assert status["outputHead"] == "hello host\n"


def test_a_timeout_kills_everything_that_a_task_started(executor: Executor, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    sleep = f"sleep 1000.{os.getpid()}"
    text = (
        f"trap '' TERM; echo $$ >> {pids}; "
        f"(trap '' TERM; while :; do {sleep}; done) & echo $! >> {pids}; "
        f"setsid sh -c 'echo $$ >> {pids}; while :; do {sleep}; done' & while :; do {sleep}; done"
    )
    # On a stalled machine the timeout may pass before all processes have started.
    for seconds in (3, 25):
        pids.write_text("")
        name = f"within-{seconds}"
        wanted = script(name, text, timeoutSeconds=seconds, graceSeconds=0.3)
        executor.call("POST", "/setTasks", [wanted])
        status = executor.final(name)
        assert status["terminated"]["reason"] == "TaskTimeout"
        found = [int(pid) for pid in pids.read_text().split()]
        eventually(lambda found=found: not any(lives(pid) for pid in found), 30)
        if len(found) == 3:
            break
    assert len(found) == 3

    # No shell has started another child while the last one was being killed.
    def no_sleep_runs() -> bool:
        return subprocess.run(["pgrep", "-f", f"^{sleep}$"], check=False).returncode == 1

    eventually(no_sleep_runs, 30)


def test_a_restarted_executor_resumes_its_tasks_and_runs_none_twice(
    executor: Executor, tmp_path: Path
) -> None:
    count, go = tmp_path / "count", tmp_path / "go"
    slow = f"echo begun >> {count}; while [ ! -e {go} ]; do sleep 0.05; done; echo last; exit 5"
    ended = f"echo began >> {count}; while [ ! -e {go} ]; do sleep 0.05; done; exit 6"
    wanted = [script("slow", slow), script("ended", ended), script("quick", f"echo q >> {count}")]
    executor.call("POST", "/setTasks", wanted)
    executor.final("quick")
    eventually(lambda: len(count.read_text().split()) == 3, 30)
    executor.end(signal.SIGKILL)
    executor.start()
    assert "running" in executor.call("GET", "/tasks/slow")["processStatus"]
    executor.call("POST", "/setTasks", wanted)
    executor.end(signal.SIGKILL)
    go.touch()
    time.sleep(0.3)
    executor.start()
    assert executor.final("slow")["terminated"]["exitCode"] == 5
    assert executor.final("ended")["terminated"]["exitCode"] == 6
    assert executor.final("slow")["outputHead"] == "last\n"
    assert sorted(count.read_text().split()) == ["began", "begun", "q"]


def test_requests_without_the_token_are_refused(executor: Executor) -> None:
    with pytest.raises(HTTPError) as refused:
        executor.call("GET", "/tasks", token="guess")
    assert refused.value.code == 401
    refused.value.close()


@pytest.mark.sandbox
def test_a_sidecar_runs_tasks_in_the_main_container(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("entering namespaces needs root")
    place = tmp_path / "inside"
    place.mkdir()
    # The main container: its own namespaces, found by its environment variable.
    inside = f"mount -t tmpfs none {place} && echo here > {place}/marker && exec sleep 1000"
    main = subprocess.Popen(
        ["unshare", "--mount", "--uts", "--ipc", "--net", "sh", "-c", inside],
        env={**os.environ, "SANDBOX_MAIN_CONTAINER": f"main-{os.getpid()}", "FROM_MAIN": "yes"},
    )
    made = Executor(tmp_path, ENABLE_SIDECAR_MODE="1", MAIN_CONTAINER_NAME=f"main-{os.getpid()}")
    try:
        eventually(lambda: Path(f"/proc/{main.pid}/root{place}/marker").exists(), 30)
        made.start()
        made.call("POST", "/setTasks", [script("t", f"cat {place}/marker; echo $FROM_MAIN")])
        status = made.final("t")
        assert status["terminated"]["exitCode"] == 0, status
        assert status["outputHead"] == "here\nyes\n"
        assert not (place / "marker").exists()
    finally:
        made.end(signal.SIGKILL)
        main.kill()
        main.wait()


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (ExecutorOptions(mode="magic"), "mode"),
        (ExecutorOptions(listen="0.0.0.0:5758"), "TASK_EXECUTOR_TOKEN"),
        (ExecutorOptions(listen="nowhere"), "host:port"),
        (ExecutorOptions(mode="container"), "CRI socket"),
        (ExecutorOptions(mode="container", cri_socket="/no/such.sock"), "/no/such.sock"),
    ],
)
def test_missing_requirements_of_a_mode_are_errors_at_startup(
    options: ExecutorOptions, word: str
) -> None:
    with pytest.raises(ExecutorError, match=word):
        check(options)


def test_the_cli_prints_the_error_and_exits() -> None:
    done = subprocess.run(
        [PADDOCK, "task-executor", "--mode", "container"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "CRI socket" in done.stderr
