"""Container mode against a real containerd: real containers, real logs, real signals."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest

from paddock.envd.tasks.cri import ContainerLauncher
from paddock.envd.tasks.files import TaskFiles
from paddock.envd.tasks.manager import TaskManager
from paddock.envd.tasks.model import Task, TaskProcess
from tests.envd.tasks.containerd import Containerd, why_not
from tests.ports import free_ports

pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.timeout(240),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]


class Rig:
    """An executor on a containerd."""

    def __init__(self, runtime: Containerd, directory: Path) -> None:
        self.runtime = runtime
        self.directory = directory
        self.tasks: TaskManager
        self.launcher: ContainerLauncher

    async def start(self) -> None:
        self.launcher = ContainerLauncher.connect(self.runtime.socket, self.runtime.pod_uid)
        await self.launcher.probe()
        self.tasks = TaskManager(self.launcher, TaskFiles(self.directory))
        await self.tasks.start()

    async def stop(self) -> None:
        self.tasks.close()
        await self.launcher._client.close()

    def status(self, name: str = "t") -> dict:
        return self.tasks.show(name)["processStatus"]

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(90):
            while not holds():
                await asyncio.sleep(0.05)

    async def final(self) -> dict:
        await self.until(lambda: self.status()["isFinal"])
        return self.status()


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with Containerd() as runtime:
        made = Rig(runtime, tmp_path / "tasks")
        await made.start()
        yield made
        await made.stop()


def script(text: str, **more: object) -> Task:
    container = {"name": "task", "image": Containerd.image, "env": [{"name": "A", "value": "1"}]}
    return Task(
        name="t",
        pod_template_spec={"spec": {"containers": [container]}},
        process=TaskProcess(command=("/bin/sh", "-c", text), grace_seconds=1.0, **more),  # type: ignore[arg-type]
    )


async def test_a_task_runs_in_a_container_of_the_pod(rig: Rig) -> None:
    rig.tasks.set([script("cat /proc/self/cgroup >&2; echo A=$A; printf unfinished; exit 3")])
    status = await rig.final()
    assert status["terminated"]["exitCode"] == 3
    said = status["outputHead"].splitlines()
    assert "A=1" in said
    # The runtime copies both streams independently: a line of stderr may follow on the same line.
    assert "unfinished" in status["outputHead"]
    assert any(line.rpartition(":")[2].startswith(rig.runtime.cgroup + "/") for line in said), said
    assert len(await rig.runtime.containers()) == 1, "only the pod's own is left"


async def test_a_task_that_ignores_term_is_killed_with_all_its_processes(rig: Rig) -> None:
    stubborn = "trap '' TERM; (trap '' TERM; sleep 1000) & echo up; while :; do sleep 1; done"
    rig.tasks.set([script(stubborn)])
    await rig.until(lambda: rig.status().get("outputHead") == "up\n")
    rig.tasks.set([])
    await rig.until(lambda: not rig.tasks.all())
    assert len(await rig.runtime.containers()) == 1


async def test_restarts_of_executor_and_runtime_lose_and_repeat_nothing(rig: Rig) -> None:
    rig.tasks.set(
        [script("echo one; while [ ! -e /tmp/go ]; do sleep 0.1; done; echo two; exit 4")]
    )
    await rig.until(lambda: rig.status().get("outputHead") == "one\n")
    (container,) = [item for item in await rig.runtime.containers() if item == _id(rig)]
    rig.runtime.stop()
    await rig.runtime.start()
    await rig.stop()
    await rig.start()
    assert "running" in rig.status()
    rig.runtime.ctr(
        "tasks", "exec", "--exec-id", "go", container, "/bin/busybox", "touch", "/tmp/go"
    )
    status = await rig.final()
    assert (status["terminated"]["exitCode"], status["outputHead"]) == (4, "one\ntwo\n")


async def test_a_failing_task_is_retried_in_a_new_container(rig: Rig) -> None:
    rig.tasks.set([script("echo again; exit 1", max_attempts=2, backoff_seconds=0.1)])
    status = await rig.final()
    assert (status["terminated"]["exitCode"], status["outputHead"]) == (1, "again\nagain\n")


async def test_a_command_that_is_not_in_the_image_fails_with_a_reason(rig: Rig) -> None:
    missing = script("")
    missing = Task(
        name="t",
        pod_template_spec=missing.pod_template_spec,
        process=TaskProcess(command=("/bin/nothing",)),
    )
    rig.tasks.set([missing])
    terminated = (await rig.final())["terminated"]
    assert terminated["reason"] == "StartFailed"
    assert "/bin/nothing" in terminated["message"]
    assert len(await rig.runtime.containers()) == 1


async def test_the_executor_serves_tasks_in_containers_over_http(rig: Rig, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    process = await asyncio.create_subprocess_exec(
        *(Path(sys.executable).with_name("paddock"), "task-executor", "--mode", "container"),
        *("--cri-socket", rig.runtime.socket, "--pod-uid", rig.runtime.pod_uid),
        *("--data-dir", str(tmp_path / "other"), "--listen-addr", f"127.0.0.1:{port}"),
        stderr=asyncio.subprocess.DEVNULL,
    )
    container = {"name": "task", "image": Containerd.image, "command": ["/bin/sh", "-c"]}
    container["args"] = ["echo from the template; exit 5"]
    wanted = {"name": "t", "podTemplateSpec": {"spec": {"containers": [container]}}}
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
            async with asyncio.timeout(90):
                while True:
                    assert process.returncode is None, "it ended"
                    with contextlib.suppress(httpx.ConnectError):
                        made = await http.post("/tasks", json=wanted)
                        break
                    await asyncio.sleep(0.1)
                assert made.status_code == 201, made.text
                while not (await http.get("/tasks/t")).json()["processStatus"]["isFinal"]:
                    await asyncio.sleep(0.1)
            status = (await http.get("/tasks/t")).json()["processStatus"]
            assert status["terminated"]["exitCode"] == 5
            assert (await http.get("/tasks/t/log")).text == "from the template\n"
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


def _id(rig: Rig) -> str:
    return rig.tasks._records["t"].handle
