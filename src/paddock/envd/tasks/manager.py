"""The tasks of one executor: requests of clients, records, watches.

`TaskManager` holds the wanted tasks and their state. One task runs in `task_run.py`; HTTP is in
`http_api.py`. Every step is saved before it is taken, so that nothing runs twice after a restart: a
running command is found again or counts as a failed attempt.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Iterable
from typing import Any

from paddock.envd.tasks.files import TaskFiles, is_name
from paddock.envd.tasks.model import Task, TaskError, TaskPhase, TaskRecord, task_json
from paddock.envd.tasks.task_launcher import RunningTask, TaskLauncher
from paddock.envd.tasks.task_run import TaskRun

log = logging.getLogger(__name__)

MAX_ACTIVE = 64
HEARTBEAT_SECONDS = 20.0


class TaskManager:
    """All tasks of one executor."""

    def __init__(self, launcher: TaskLauncher, files: TaskFiles) -> None:
        self._launcher = launcher
        self._files = files
        self._records: dict[str, TaskRecord] = {}
        self._work: dict[str, asyncio.Task[None]] = {}
        self._runs: dict[str, TaskRun] = {}
        self._changed = asyncio.Event()

    # -- lifecycle

    async def start(self) -> int:
        """Resume the tasks of an earlier executor; return the number of tasks."""
        for record in self._files.load():
            self._records[record.name] = record
            if record.is_unwanted or not record.is_final:
                running: RunningTask | None = None
                if record.state in (TaskPhase.STARTING, TaskPhase.RUNNING):
                    path = str(self._files.log_path(record.name))
                    running = await self._launcher.find(record, path)
                run = self._new_run(record)
                self._supervised(run, run.resume(running))
        return len(self._records)

    def close(self) -> None:
        """Stop managing tasks; commands keep running."""
        for task in self._work.values():
            task.cancel()
        self._work.clear()
        self._runs.clear()

    @property
    def active(self) -> int:
        """The number of tasks that are not final."""
        return sum(1 for record in self._records.values() if not record.is_final)

    # -- requests of clients

    def all(self) -> list[dict[str, Any]]:
        """Return every task as JSON."""
        return [self.show(name) for name in self._records]

    def show(self, name: str) -> dict[str, Any]:
        """Return one task as JSON."""
        record = self._records.get(name)
        if record is None:
            raise TaskError(f"there is no task {name!r}", 404)
        return task_json(record, *self._files.output_ends(name))

    def log_path(self, name: str) -> str:
        """Return the path of a task's output."""
        self.show(name)
        return str(self._files.log_path(name))

    async def watch(self) -> AsyncIterator[list[dict[str, Any]]]:
        """Yield every task now, at every change, and at least every `HEARTBEAT_SECONDS`."""
        while True:
            changed = self._changed
            yield self.all()
            try:
                async with asyncio.timeout(HEARTBEAT_SECONDS):
                    await changed.wait()
            except TimeoutError:
                continue

    def set(self, wanted: Iterable[Task]) -> list[dict[str, Any]]:
        """Run exactly these tasks; existing ones are not changed."""
        named = {task.name: task for task in wanted if task.name}
        for task in named.values():
            if task.name not in self._records:
                self.check(task)
        for name in [name for name in self._records if name not in named]:
            self.remove(name)
        for task in named.values():
            known = self._records.get(task.name)
            if known is None:
                self.add(task)
        return self.all()

    def check(self, task: Task) -> None:
        """Raise `TaskError` for a task that can never run."""
        if not is_name(task.name):
            raise TaskError("a task needs a name of letters, digits, dashes and dots")
        if task.process is None and task.pod_template_spec is None:
            raise TaskError(f"task {task.name} has neither process nor podTemplateSpec")
        if task.process is not None and not task.process.command:
            raise TaskError(f"task {task.name}: process.command is empty")

    def add(self, task: Task) -> dict[str, Any]:
        """Start a new task."""
        self.check(task)
        if task.name in self._records:
            raise TaskError(f"task {task.name} exists", 500)
        if self.active >= MAX_ACTIVE:
            raise TaskError(f"{MAX_ACTIVE} tasks are active already", 500)
        first = task.process.first_attempt if task.process is not None else 1
        record = TaskRecord(task=task, attempt=max(first, 1))
        self._save(record)
        run = self._new_run(record)
        self._supervised(run, run.run())
        return self.show(task.name)

    def remove(self, name: str) -> None:
        """Stop a task and delete it; an unknown task is no error."""
        if (run := self._runs.get(name)) is not None:
            run.stop()
        elif name in self._records:
            self._forget(name)

    # -- supervision

    def _new_run(self, record: TaskRecord) -> TaskRun:
        path = str(self._files.log_path(record.name))
        return TaskRun(record, self._launcher, path, self._save)

    def _supervised(self, run: TaskRun, work: Coroutine[Any, Any, None]) -> None:
        name = run.record.name
        self._runs[name] = run
        self._work[name] = asyncio.get_running_loop().create_task(
            self._supervise(run, work), name=f"task {name}"
        )

    async def _supervise(self, run: TaskRun, work: Coroutine[Any, Any, None]) -> None:
        name = run.record.name
        try:
            await work
        except Exception:
            log.exception("task failed unexpectedly", extra={"task": name})
            run.fail()
        finally:
            self._work.pop(name, None)
            self._runs.pop(name, None)
        if run.record.is_unwanted:
            self._forget(name)

    def _save(self, record: TaskRecord) -> None:
        self._files.save(record)
        self._records[record.name] = record
        self._notify()

    def _forget(self, name: str) -> None:
        self._records.pop(name, None)
        self._files.remove(name)
        self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
