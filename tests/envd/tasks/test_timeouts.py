"""Timeouts of tasks count running time, not pauses. In virtual time."""

import asyncio
from pathlib import Path

import pytest

from paddock.envd.tasks.files import TaskFiles
from paddock.envd.tasks.manager import TaskManager
from paddock.envd.tasks.model import Task, TaskHook, TaskHooks, TaskProcess, TaskRecord

pytestmark = pytest.mark.looptime


class Sleeper:
    """A command whose time passes only while its sandbox is not paused."""

    handle = "1"

    def __init__(self, awake: asyncio.Event, seconds: float) -> None:
        self._awake = awake
        self._code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._work = asyncio.get_running_loop().create_task(self._run(seconds))

    async def _run(self, seconds: float) -> None:
        for _ in range(int(seconds * 10)):
            await asyncio.sleep(0.1)
            await self._awake.wait()
        self._over(0)

    def _over(self, code: int) -> None:
        if not self._code.done():
            self._code.set_result(code)

    cause = ""

    async def wait(self) -> int:
        return await asyncio.shield(self._code)

    async def signal(self, number: int) -> None:
        self._work.cancel()
        self._over(128 + number)

    async def wait_responsive(self) -> None:
        await self._awake.wait()


class Sleepers:
    """Launches sleepers: the first word of the command is the duration."""

    def __init__(self) -> None:
        self.awake = asyncio.Event()
        self.awake.set()

    async def launch(
        self, record: TaskRecord, argv: tuple[str, ...], log_path: str, *, is_hook: bool = False
    ) -> Sleeper:
        return Sleeper(self.awake, float(argv[0]))

    async def find(self, record: TaskRecord, log_path: str) -> Sleeper | None:
        return None


async def _ended(
    tmp_path: Path, process: TaskProcess, *, paused_at: float, for_seconds: float
) -> dict:
    sleepers = Sleepers()
    tasks = TaskManager(sleepers, TaskFiles(tmp_path))
    tasks.add(Task(name="t", process=process))
    await asyncio.sleep(paused_at)
    sleepers.awake.clear()
    await asyncio.sleep(for_seconds)
    assert tasks.active == 1
    sleepers.awake.set()
    await asyncio.sleep(1000)
    return tasks.show("t")["processStatus"]["terminated"]


@pytest.mark.parametrize("paused_at", [1.0, 30.0, 55.0])
@pytest.mark.parametrize("for_seconds", [20.0, 5000.0])
async def test_a_pause_does_not_count_towards_the_timeout_of_a_task(
    tmp_path: Path, paused_at: float, for_seconds: float
) -> None:
    process = TaskProcess(command=("57",), timeout_seconds=60)
    ended = await _ended(tmp_path, process, paused_at=paused_at, for_seconds=for_seconds)
    assert (ended["reason"], ended["exitCode"]) == ("Succeeded", 0)


async def test_a_pause_does_not_extend_the_timeout_of_a_task(tmp_path: Path) -> None:
    process = TaskProcess(command=("70",), timeout_seconds=60, grace_seconds=1)
    ended = await _ended(tmp_path, process, paused_at=30.0, for_seconds=600.0)
    assert (ended["reason"], ended["exitCode"]) == ("TaskTimeout", 137)


async def test_a_pause_does_not_count_towards_the_timeout_of_a_hook(tmp_path: Path) -> None:
    hook = TaskHook(command=("4",), timeout_seconds=5)
    process = TaskProcess(command=("1",), lifecycle=TaskHooks(pre_start=hook))
    ended = await _ended(tmp_path, process, paused_at=2.0, for_seconds=60.0)
    assert ended["reason"] == "Succeeded"


async def test_a_task_that_is_removed_during_its_hook_is_deleted(tmp_path: Path) -> None:
    hook = TaskHook(command=("4",), timeout_seconds=5)
    process = TaskProcess(command=("1",), lifecycle=TaskHooks(pre_start=hook))
    tasks = TaskManager(Sleepers(), TaskFiles(tmp_path))
    tasks.add(Task(name="t", process=process))
    await asyncio.sleep(2)

    tasks.remove("t")
    await asyncio.sleep(60)

    assert tasks.all() == []
