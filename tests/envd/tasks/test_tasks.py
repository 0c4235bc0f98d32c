"""Tasks in a sandbox: runs, retries, stops, watches, restarts."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from paddock.envd.config import EnvdSettings
from paddock.envd.process.direct_spawner import DirectSpawner
from paddock.envd.process.init_spawner import InitSpawner
from tests.envd.conftest import Init
from tests.envd.rig import Rig, close_rig, open_rig

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(params=["direct", "init"])
async def rig(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Rig]:
    spawner = DirectSpawner()
    if request.param == "init":
        spawner = InitSpawner(request.getfixturevalue("init").channel())
    opened = await open_rig(tmp_path, spawner=spawner, tasks_dir=str(tmp_path / "tasks"))
    yield opened
    await close_rig(opened)


def script(name: str, text: str, **process) -> dict:
    return {"name": name, "process": {"command": ["/bin/sh", "-c", text], **process}}


async def set_tasks(rig: Rig, *tasks: dict) -> list:
    answer = await rig.request("POST", "/setTasks", json.dumps(tasks).encode())
    assert answer.status == 200, answer.body
    return answer.json()


async def status_of(rig: Rig, name: str) -> dict:
    answer = await rig.request("GET", f"/tasks/{name}")
    assert answer.status == 200, answer.body
    return answer.json()["processStatus"]


async def final(rig: Rig, name: str, seconds: float = 20) -> dict:
    async with asyncio.timeout(seconds):
        while not (status := await status_of(rig, name))["isFinal"]:
            await asyncio.sleep(0.02)
    return status


async def gone(pid: int, seconds: float = 20) -> None:
    def lives() -> bool:
        try:
            return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return False

    async with asyncio.timeout(seconds):
        while lives():
            await asyncio.sleep(0.02)


async def written(path: Path, seconds: float = 20) -> str:
    async with asyncio.timeout(seconds):
        while not path.exists() or not path.read_text().strip():
            await asyncio.sleep(0.02)
    return path.read_text().strip()


async def test_a_task_has_an_exit_code_and_output(rig: Rig) -> None:
    env = [{"name": "WHO", "value": "world"}]
    await set_tasks(rig, script("t", "echo hello $WHO; echo oops >&2; exit 3", env=env))
    status = await final(rig, "t")
    assert status["terminated"]["exitCode"] == 3
    assert status["terminated"]["reason"] == "Failed"
    assert sorted(status["outputHead"].split("\n")) == ["", "hello world", "oops"]
    log = await rig.request("GET", "/tasks/t/log")
    assert sorted(log.body.split(b"\n")) == [b"", b"hello world", b"oops"]


async def test_setting_the_same_tasks_again_runs_nothing_again(rig: Rig) -> None:
    count = rig.home / "count"
    wanted = script("t", f"echo x >> {count}")
    await set_tasks(rig, wanted)
    await final(rig, "t")
    for _ in range(3):
        await set_tasks(rig, wanted)
    assert count.read_text() == "x\n"


async def test_the_routes_are_those_of_a_task_executor(rig: Rig) -> None:
    body = json.dumps(script("one", "true")).encode()
    assert (await rig.request("POST", "/tasks", body)).status == 201
    again = await rig.request("POST", "/tasks", body)
    assert (again.status, again.json()["code"]) == (500, "Internal Server Error")
    await final(rig, "one")
    assert [item["name"] for item in (await rig.request("GET", "/getTasks")).json()] == ["one"]
    assert [item["name"] for item in (await rig.request("GET", "/tasks")).json()] == ["one"]
    assert (await rig.request("GET", "/tasks/none")).status == 404
    assert (await rig.request("POST", "/tasks", b"{}")).status == 400
    assert (await rig.request("POST", "/setTasks", b"nonsense")).status == 400
    assert (await rig.request("DELETE", "/tasks/one")).status == 204
    assert (await rig.request("DELETE", "/tasks/unknown")).status == 204
    assert (await rig.request("GET", "/tasks")).json() == []
    wire = await rig.wire()
    wire.writer.write(b"GET /health HTTP/1.1\r\nHost: 5758-isbx.example\r\n\r\n")
    healthy = await wire.response()
    wire.close()
    assert (healthy.status, healthy.json()) == (200, {"status": "healthy"})


async def test_a_stop_kills_the_whole_group_if_it_ignores_term(rig: Rig) -> None:
    pids = rig.home / "pids"
    text = (
        "trap '' TERM; (trap '' TERM; sleep 1000 & echo $! >> PIDS; wait) & "
        "setsid sh -c 'trap \"\" TERM; echo $$ >> PIDS; sleep 1000; sleep 1000' & "
        "sleep 0.3; echo $$ >> PIDS; echo up > PIDS.up; while :; do sleep 1; done"
    )
    await set_tasks(rig, script("t", text.replace("PIDS", str(pids)), graceSeconds=0.3))
    await written(Path(f"{pids}.up"))
    await set_tasks(rig)
    async with asyncio.timeout(20):
        while (await rig.request("GET", "/tasks")).json():
            await asyncio.sleep(0.05)
    namespaced = [int(line) for line in pids.read_text().split()]
    for pid in namespaced:
        await gone(pid)


async def test_a_task_that_exceeds_its_timeout_is_killed(rig: Rig) -> None:
    await set_tasks(rig, script("t", "sleep 1000", timeoutSeconds=0.3, graceSeconds=1))
    status = await final(rig, "t")
    assert status["terminated"]["reason"] == "TaskTimeout"
    assert status["terminated"]["exitCode"] == 137


async def test_a_failing_task_is_retried_until_it_succeeds(rig: Rig) -> None:
    count = rig.home / "count"
    text = f"echo x >> {count}; [ $(wc -l < {count}) -ge 3 ]"
    await set_tasks(rig, script("t", text, maxAttempts=5, backoffSeconds=0.05))
    status = await final(rig, "t")
    assert status["terminated"]["exitCode"] == 0
    assert status["attempt"] == 3


async def test_hooks_run_before_and_after(rig: Rig) -> None:
    trace = rig.home / "trace"
    hooks = {
        "preStart": {"command": ["/bin/sh", "-c", f"echo before >> {trace}"]},
        "postStop": {"exec": {"command": ["/bin/sh", "-c", f"echo after >> {trace}"]}},
    }
    await set_tasks(rig, script("t", f"echo task >> {trace}; exit 1", lifecycle=hooks))
    await final(rig, "t")
    assert trace.read_text().split() == ["before", "task", "after"]


async def test_a_failing_pre_start_hook_fails_the_task(rig: Rig) -> None:
    trace = rig.home / "trace"
    hooks = {"preStart": {"command": ["/bin/false"]}}
    await set_tasks(rig, script("t", f"echo task >> {trace}", lifecycle=hooks))
    status = await final(rig, "t")
    assert status["terminated"]["reason"] == "PreStartHookFailed"
    assert not trace.exists()


async def test_changes_are_sent_to_watching_clients(rig: Rig) -> None:
    wire = await rig.wire()
    await wire.send("GET", "/tasks?watch=1", {})
    await wire.head()
    assert json.loads(await wire.chunk()) == []
    await set_tasks(rig, script("t", "exit 4"))
    async with asyncio.timeout(20):
        while True:
            (task,) = json.loads(await wire.chunk())
            if task["processStatus"]["isFinal"]:
                break
    assert task["processStatus"]["terminated"]["exitCode"] == 4
    wire.close()


async def test_a_command_that_cannot_be_run_fails_with_a_reason(rig: Rig) -> None:
    await set_tasks(rig, {"name": "t", "process": {"command": ["/no/such/program"]}})
    status = await final(rig, "t")
    assert status["terminated"]["reason"] == "StartFailed"
    assert "/no/such/program" in status["terminated"]["message"]


async def test_background_processes_do_not_delay_the_end_of_a_task(rig: Rig) -> None:
    pid = rig.home / "pid"
    await set_tasks(rig, script("t", f"sleep 1000 & echo $! > {pid}; echo done"))
    status = await final(rig, "t")
    assert status["terminated"]["exitCode"] == 0
    assert status["outputHead"] == "done\n"
    os.kill(int(pid.read_text()), 9)


async def test_the_task_routes_require_the_access_token(tmp_path: Path) -> None:
    settings = EnvdSettings(access_token="secret")
    opened = await open_rig(tmp_path, settings=settings, tasks_dir=str(tmp_path / "tasks"))
    assert (await opened.request("GET", "/tasks")).status == 401
    assert (await opened.request("GET", "/tasks", x_access_token="secret")).status == 200
    opened.envd.close()


async def test_a_new_envd_resumes_running_tasks_and_runs_none_twice(
    init: Init, tmp_path: Path
) -> None:
    async def fresh(name: str) -> Rig:
        (tmp_path / name).mkdir()
        return await open_rig(
            tmp_path / name,
            spawner=InitSpawner(init.channel()),
            tasks_dir=str(tmp_path / "tasks"),
        )

    first = await fresh("one")
    count, go = first.home / "count", first.home / "go"
    text = f"echo begun >> {count}; while [ ! -e {go} ]; do sleep 0.05; done; echo last; exit 5"
    await set_tasks(first, script("t", text), script("quick", f"echo quick >> {count}"))
    await final(first, "quick")
    first.envd.close()
    await asyncio.sleep(0)

    second = await fresh("two")
    assert "running" in await status_of(second, "t")
    await set_tasks(second, script("t", text), script("quick", f"echo quick >> {count}"))
    go.touch()
    status = await final(second, "t")
    assert status["terminated"]["exitCode"] == 5
    assert status["outputHead"].endswith("last\n")
    assert sorted(count.read_text().split()) == ["begun", "quick"]
    second.envd.close()
    await asyncio.sleep(0)


async def test_a_task_that_is_not_found_again_has_failed_and_is_not_rerun(
    tmp_path: Path,
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    first = await open_rig(one, tasks_dir=str(tmp_path / "tasks"))
    count = first.home / "count"
    await set_tasks(first, script("t", f"echo $$ >> {count}; sleep 1000"))
    pid = int(await written(count))
    first.envd.close()
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    second = await open_rig(two, tasks_dir=str(tmp_path / "tasks"))
    status = await final(second, "t")
    assert status["terminated"]["reason"] == "ProcessLost"
    assert count.read_text() == f"{pid}\n"
    second.envd.close()
