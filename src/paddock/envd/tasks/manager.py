"""Tasks: each is run once, retried if it fails, and ended on request.

`TaskManager` holds the wanted tasks and their state. Commands run through a `Launcher`
(`launcher.py`); HTTP is in `http_api.py`. Every step is saved before it is taken, so that nothing
runs twice after a restart: a running command is found again or counts as a failed attempt.
"""

import asyncio
import logging
import signal
import time
from collections.abc import AsyncIterator, Coroutine, Iterable
from datetime import UTC, datetime
from typing import Any

from msgspec import Struct, structs

from paddock.envd.tasks.files import TaskFiles, is_name
from paddock.envd.tasks.launcher import Launcher, RunningTask, TaskLaunchError
from paddock.envd.tasks.model import Task, TaskError, TaskHook, TaskPhase, TaskRecord, task_json
from paddock.envd.tasks.running_time import seconds_left, wait_running

log = logging.getLogger(__name__)

MAX_ACTIVE = 64
BACKOFF_LIMIT_SECONDS = 300.0
KILL_SECONDS = 5.0
HEARTBEAT_SECONDS = 20.0
TIMED_OUT, LOST, STOPPED = "TaskTimeout", "ProcessLost", "Stopped"


class AttemptResult(Struct, frozen=True):
    """The result of an attempt."""

    reason: str
    message: str
    exit_code: int = 137


class TaskManager:
    """All tasks of one executor."""

    def __init__(self, launcher: Launcher, files: TaskFiles) -> None:
        self._launcher = launcher
        self._files = files
        self._records: dict[str, TaskRecord] = {}
        self._work: dict[str, asyncio.Task[None]] = {}
        self._stop_events: dict[str, asyncio.Event] = {}
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
                self._start_work(record.name, self._resume(record.name, running))
        return len(self._records)

    def close(self) -> None:
        """Stop managing tasks; commands keep running."""
        for task in self._work.values():
            task.cancel()
        self._work.clear()

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
            raise TaskError(f"task {task.name} says neither process nor podTemplateSpec")
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
        self._save(TaskRecord(task=task, attempt=max(first, 1)))
        self._start_work(task.name, self._run(task.name))
        return self.show(task.name)

    def remove(self, name: str) -> None:
        """Stop a task and delete it; an unknown task is no error."""
        record = self._records.get(name)
        if record is None:
            return
        if name in self._work:
            if not record.is_unwanted:
                self._save(structs.replace(record, is_unwanted=True))
            self._stop_events[name].set()
        else:
            self._forget(name)

    # -- running

    def _start_work(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        self._stop_events[name] = asyncio.Event()
        if self._records[name].is_unwanted:
            self._stop_events[name].set()
        task = asyncio.get_running_loop().create_task(
            self._supervise(name, work), name=f"task {name}"
        )
        self._work[name] = task

    async def _supervise(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception:
            log.exception("task failed unexpectedly", extra={"task": name})
            self._record_result(
                name, AttemptResult("ExecutorError", "the executor failed; see its log")
            )
        finally:
            self._work.pop(name, None)
            self._stop_events.pop(name, None)
        record = self._records.get(name)
        if record is not None and record.is_unwanted:
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

    async def _resume(self, name: str, running: RunningTask | None) -> None:
        """Continue a task of an earlier executor."""
        record = self._records[name]
        if record.is_final:
            return
        if record.state in (TaskPhase.STARTING, TaskPhase.RUNNING):
            end = AttemptResult(LOST, "the executor was restarted and did not find it again")
            if running is not None:
                self._save(structs.replace(record, state=TaskPhase.RUNNING, handle=running.handle))
                end = await self._wait_for_end(name, running)
            if not await self._retry(name, end):
                return
        elif record.state is TaskPhase.BACKING_OFF and not await self._back_off(name):
            return
        await self._run(name)

    async def _run(self, name: str) -> None:
        while await self._retry(name, await self._attempt(name)):
            pass

    async def _attempt(self, name: str) -> AttemptResult:
        """Run the task once; return the result."""
        record = self._records[name]
        if self._stop_events[name].is_set():
            return AttemptResult(STOPPED, "it was stopped before it started")
        process = record.task.process
        hook = process.lifecycle.pre_start if process is not None else None
        # Saved before anything runs: a later executor sees that the command may have run.
        record = structs.replace(
            record, state=TaskPhase.STARTING, reason="", message="", started_at=_now()
        )
        record = structs.replace(record, exit_code=None, finished_at=None, handle="")
        self._save(record)
        if hook is not None and (problem := await self._hook(name, hook)):
            return AttemptResult("PreStartHookFailed", problem, 1)
        argv = process.argv if process is not None else ()
        try:
            running = await self._launcher.launch(record, argv, str(self._files.log_path(name)))
        except TaskLaunchError as error:
            return AttemptResult("StartFailed", str(error), 127)
        self._save(structs.replace(record, state=TaskPhase.RUNNING, handle=running.handle))
        return await self._wait_for_end(name, running)

    async def _wait_for_end(self, name: str, running: RunningTask) -> AttemptResult:
        """Wait for the end, the timeout or a stop request; return the result."""
        record = self._records[name]
        process = record.task.process
        ended = asyncio.ensure_future(running.wait())
        stopped = asyncio.ensure_future(self._stop_events[name].wait())
        try:
            limit = process.timeout_seconds if process is not None else None
            if limit is None:
                await asyncio.wait({ended, stopped}, return_when="FIRST_COMPLETED")
            else:
                await wait_running(
                    seconds_left(record, limit, _now()), limit, running, {ended, stopped}
                )
            if ended.done():
                code = ended.result()
                reason = "Succeeded" if code == 0 else "Failed"
                return AttemptResult(reason, "" if code == 0 else f"exit code {code}", code)
            grace = process.grace_seconds if process is not None else 10.0
            await self._terminate(running, ended, grace)
            if stopped.done():
                return AttemptResult(STOPPED, "it was stopped", 143)
            return AttemptResult(TIMED_OUT, f"it ran longer than {limit:g} s")
        finally:
            ended.cancel()
            stopped.cancel()

    async def _terminate(
        self, running: RunningTask, ended: "asyncio.Future[int]", grace: float
    ) -> None:
        """Send TERM, then KILL after the grace period, to all processes of the task."""
        await running.signal(signal.SIGTERM)
        await asyncio.wait({ended}, timeout=grace)
        # Even if the leader has ended: other processes may still run.
        await running.signal(signal.SIGKILL)
        await asyncio.wait({ended}, timeout=KILL_SECONDS)

    async def _retry(self, name: str, end: AttemptResult) -> bool:
        """Save the result of an attempt; return whether another attempt follows."""
        record = self._records[name]
        process = record.task.process
        most = process.max_attempts if process is not None else 1
        tries = end.exit_code != 0 and end.reason != STOPPED and record.attempt < most
        if not tries or self._stop_events[name].is_set():
            await self._finish(name, end)
            return False
        self._record_result(name, end, state=TaskPhase.BACKING_OFF)
        return await self._back_off(name)

    async def _back_off(self, name: str) -> bool:
        """Wait before the next attempt; return false if the task was stopped meanwhile."""
        record = self._records[name]
        process = record.task.process
        base = process.backoff_seconds if process is not None else 1.0
        seconds = min(base * 2.0 ** (record.attempt - 1), BACKOFF_LIMIT_SECONDS)
        try:
            async with asyncio.timeout(seconds):
                await self._stop_events[name].wait()
        except TimeoutError:
            self._save(structs.replace(record, attempt=record.attempt + 1, state=TaskPhase.PENDING))
            return True
        await self._finish(name, AttemptResult(STOPPED, "it was stopped", 143))
        return False

    async def _finish(self, name: str, end: AttemptResult) -> None:
        process = self._records[name].task.process
        hook = process.lifecycle.post_stop if process is not None else None
        message = end.message
        if hook is not None and (problem := await self._hook(name, hook)):
            message = f"{message}; postStop: {problem}".lstrip("; ")
        self._record_result(name, AttemptResult(end.reason, message, end.exit_code))

    def _record_result(
        self, name: str, end: AttemptResult, *, state: TaskPhase | None = None
    ) -> None:
        over = TaskPhase.SUCCEEDED if end.exit_code == 0 else TaskPhase.FAILED
        self._save(
            structs.replace(
                self._records[name],
                state=state or over,
                exit_code=end.exit_code,
                reason=end.reason,
                message=end.message,
                finished_at=_now(),
                is_final=state is None,
            )
        )

    async def _hook(self, name: str, hook: TaskHook) -> str:
        """Run a hook; return the error, or an empty string."""
        record = self._records[name]
        try:
            path = str(self._files.log_path(name))
            running = await self._launcher.launch(record, hook.argv, path, is_hook=True)
        except TaskLaunchError as error:
            return str(error)
        ended = asyncio.ensure_future(running.wait())
        try:
            await wait_running(hook.timeout_seconds, hook.timeout_seconds, running, {ended})
            if not ended.done():
                await self._terminate(running, ended, 1.0)
                return f"the hook ran longer than {hook.timeout_seconds:g} s"
            code = ended.result()
            return f"the hook ended with {code}" if code else ""
        finally:
            ended.cancel()


def _now() -> datetime:
    return datetime.fromtimestamp(time.time(), UTC)
