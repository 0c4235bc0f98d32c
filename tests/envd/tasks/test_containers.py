"""Container mode against a CRI server on a real socket, whose containers are processes."""

import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from paddock.envd.tasks.cri import LABEL_TASK, ContainerLauncher
from paddock.envd.tasks.cri_wire import decode, encode, get_int, get_text, map_entries
from paddock.envd.tasks.files import TaskFiles
from paddock.envd.tasks.manager import TaskManager
from paddock.envd.tasks.model import Task, TaskProcess
from paddock.envd.tasks.task_launcher import ExecutorError

pytestmark = pytest.mark.timeout(120)


class FakeRuntime(grpc.GenericRpcHandler):
    """A fake container runtime with the methods that the executor uses."""

    def __init__(self) -> None:
        self.containers: dict[str, dict] = {}
        self.pulled: list[str] = []
        self.made = 0
        self.last_words = b""
        """Output that appears in the log shortly after the container is removed."""
        self.malformed = 0
        """Number of next statuses that are malformed."""

    def service(self, handler_call_details):
        name = handler_call_details.method.rpartition("/")[2]
        return grpc.unary_unary_rpc_method_handler(
            getattr(self, name), request_deserializer=decode, response_serializer=encode
        )

    async def Version(self, request, context):
        return {1: "0.1.0", 2: "fake", 3: "1", 4: "v1"}

    async def ListPodSandbox(self, request, context):
        return {1: [{1: "sandbox-1", 2: {1: "pod", 2: "uid-1", 3: "default"}}]}

    async def ImageStatus(self, request, context):
        return {1: {1: "here"}} if get_text(decode(request[1][0]), 1) in self.pulled else {}

    async def PullImage(self, request, context):
        self.pulled.append(get_text(decode(request[1][0]), 1))
        return {1: "ref"}

    async def CreateContainer(self, request, context):
        config = decode(request[2][0])
        self.made += 1
        ident = f"c{self.made}"
        labels = {get_text(decode(i), 1): get_text(decode(i), 2) for i in config.get(9, [])}
        argv = [item.decode() for item in (*config.get(3, []), *config.get(4, []))]
        env = {get_text(decode(i), 1): get_text(decode(i), 2) for i in config.get(6, [])}
        log = Path(get_text(decode(request[3][0]), 3)) / get_text(config, 11)
        self.containers[ident] = {"argv": argv, "labels": labels, "env": env, "log": log}
        return {1: ident}

    async def StartContainer(self, request, context):
        found = self.containers[get_text(request, 1)]
        found["process"] = await asyncio.create_subprocess_exec(
            *found["argv"], stdout=asyncio.subprocess.PIPE, env=found["env"]
        )
        found["copy"] = asyncio.create_task(_copy(found["process"].stdout, found["log"]))
        return {}

    async def ListContainers(self, request, context):
        wanted = {
            get_text(decode(i), 1): get_text(decode(i), 2) for i in decode(request[1][0]).get(4, [])
        }
        return {
            1: [
                {1: ident, 8: map_entries(found["labels"])}
                for ident, found in self.containers.items()
                if wanted.items() <= found["labels"].items()
            ]
        }

    async def ContainerStatus(self, request, context):
        process = self.containers[get_text(request, 1)]["process"]
        if self.malformed:
            self.malformed -= 1
            return {1: b"\xff"}
        if process.returncode is None:
            return {1: {1: get_text(request, 1), 3: 1}}
        await self.containers[get_text(request, 1)]["copy"]
        code = process.returncode if process.returncode >= 0 else 128 - process.returncode
        return {1: {1: get_text(request, 1), 3: 2, 7: code}}

    async def StopContainer(self, request, context):
        process = self.containers[get_text(request, 1)]["process"]
        # Not `process.send_signal`: that polls, and takes the exit code from asyncio's watcher.
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGTERM)
            try:
                async with asyncio.timeout(get_int(request, 2)):
                    await process.wait()
            except TimeoutError:
                os.kill(process.pid, signal.SIGKILL)
                await process.wait()
        return {}

    async def RemoveContainer(self, request, context):
        found = self.containers.pop(get_text(request, 1), None)
        if found is not None and self.last_words:
            asyncio.get_running_loop().call_later(0.05, _write, found["log"], self.last_words)
        return {}


async def _copy(output: asyncio.StreamReader, log: Path) -> None:
    """Write a log in the CRI format: time, stream, tag, text."""
    log.touch()
    async for line in output:
        _write(log, line)


def _write(log: Path, line: bytes) -> None:
    with log.open("ab", buffering=0) as file:
        file.write(b"2026-11-01T10:00:00.000000001Z stdout F " + line)


@pytest.fixture
async def runtime() -> AsyncIterator[tuple[FakeRuntime, str]]:
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/cri.sock"
        made = FakeRuntime()
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((made,))
        server.add_insecure_port(f"unix://{path}")
        await server.start()
        yield made, path
        await server.stop(None)


def wanted(name: str, *command: str) -> Task:
    container = {"name": "task", "image": "busybox", "command": list(command)}
    return Task(
        name=name,
        pod_template_spec={"spec": {"containers": [container]}},
        process=TaskProcess(command=command, grace_seconds=1.0),
    )


async def final(tasks: TaskManager, name: str) -> dict:
    async with asyncio.timeout(60):
        while not (status := tasks.show(name)["processStatus"])["isFinal"]:
            await asyncio.sleep(0.05)
    return status


async def opened(path: str) -> ContainerLauncher:
    launcher = ContainerLauncher.connect(path, "uid-1")
    await launcher.probe()
    return launcher


async def test_a_task_is_a_container_with_an_exit_code_and_a_log(runtime, tmp_path: Path) -> None:
    cri, path = runtime
    launcher = await opened(path)
    tasks = TaskManager(launcher, TaskFiles(tmp_path))
    tasks.set([wanted("t", "/bin/sh", "-c", "echo hello; echo two words; exit 3")])
    status = await final(tasks, "t")
    assert status["terminated"]["exitCode"] == 3
    assert status["outputHead"] == "hello\ntwo words\n"
    assert cri.pulled == ["busybox"]
    assert cri.containers == {}
    await launcher._client.close()


async def test_output_written_after_the_exit_is_kept(runtime, tmp_path: Path) -> None:
    cri, path = runtime
    cri.last_words = b"unfinished\n"
    launcher = await opened(path)
    tasks = TaskManager(launcher, TaskFiles(tmp_path))
    tasks.set([wanted("t", "/bin/sh", "-c", "echo hello")])
    assert (await final(tasks, "t"))["outputHead"] == "hello\nunfinished\n"
    await launcher._client.close()


async def test_a_malformed_status_is_reported_once_and_read_again(
    runtime, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cri, path = runtime
    cri.malformed = 3
    launcher = await opened(path)
    tasks = TaskManager(launcher, TaskFiles(tmp_path))
    tasks.set([wanted("t", "/bin/sh", "-c", "exit 3")])
    status = await final(tasks, "t")
    assert status["terminated"]["exitCode"] == 3
    [said] = [item for item in caplog.records if item.message == "container status not read"]
    assert "malformed message from the container runtime" in said.error
    assert said.container == "c1"
    await launcher._client.close()


async def test_a_stopped_task_that_ignores_term_is_killed(runtime, tmp_path: Path) -> None:
    cri, path = runtime
    launcher = await opened(path)
    tasks = TaskManager(launcher, TaskFiles(tmp_path))
    tasks.set([wanted("t", "/bin/sh", "-c", "trap '' TERM; echo up; while :; do sleep 0.1; done")])
    async with asyncio.timeout(60):
        while tasks.show("t")["processStatus"].get("outputHead") != "up\n":
            await asyncio.sleep(0.05)
    (container,) = cri.containers.values()
    tasks.set([])
    async with asyncio.timeout(60):
        while tasks.all():
            await asyncio.sleep(0.05)
    assert container["process"].returncode == -9
    await launcher._client.close()


async def test_a_new_executor_finds_the_container_and_creates_no_other(
    runtime, tmp_path: Path
) -> None:
    cri, path = runtime
    first = await opened(path)
    tasks = TaskManager(first, TaskFiles(tmp_path))
    go = tmp_path / "go"
    text_of = f"while [ ! -e {go} ]; do sleep 0.05; done; exit 4"
    tasks.set([wanted("t", "/bin/sh", "-c", text_of)])
    async with asyncio.timeout(60):
        while "running" not in tasks.show("t")["processStatus"]:
            await asyncio.sleep(0.05)
    tasks.close()
    await first._client.close()
    second = await opened(path)
    again = TaskManager(second, TaskFiles(tmp_path))
    await again.start()
    again.set([wanted("t", "/bin/sh", "-c", text_of)])
    go.touch()
    assert (await final(again, "t"))["terminated"]["exitCode"] == 4
    assert cri.made == 1
    assert LABEL_TASK == "paddock.dev/task"
    await second._client.close()


async def test_a_socket_without_a_runtime_is_an_error_at_startup(tmp_path: Path) -> None:
    launcher = ContainerLauncher.connect(str(tmp_path / "none.sock"), "uid-1")
    with pytest.raises(ExecutorError, match="no CRI runtime"):
        await launcher.probe()
    await launcher._client.close()
