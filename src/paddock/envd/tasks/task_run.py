"""One task: attempts, retries, hooks, timeout and stop."""

import asyncio
import signal
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from msgspec import Struct, structs

from paddock.envd.tasks.model import TaskHook, TaskPhase, TaskRecord
from paddock.envd.tasks.running_time import seconds_left, wait_running
from paddock.envd.tasks.task_launcher import RunningTask, TaskLauncher, TaskLaunchError

BACKOFF_LIMIT_SECONDS = 300.0
KILL_SECONDS = 5.0
TIMED_OUT, LOST, STOPPED = "TaskTimeout", "ProcessLost", "Stopped"


class AttemptResult(Struct, frozen=True):
    """The result of an attempt."""

    reason: str
    message: str
    exit_code: int = 137


class TaskRun:
    """Runs one task until its record is final."""

    def __init__(
        self,
        record: TaskRecord,
        launcher: TaskLauncher,
        log_path: str,
        save: Callable[[TaskRecord], None],
    ) -> None:
        self.record = record
        self._launcher = launcher
        self._log_path = log_path
        self._save = save
        self._stop = asyncio.Event()
        if record.is_unwanted:
            self._stop.set()

    def stop(self) -> None:
        """Stop the task; its record is marked as unwanted."""
        if not self.record.is_unwanted:
            self._update(is_unwanted=True)
        self._stop.set()

    def fail(self) -> None:
        """Record that the executor itself failed."""
        self._record_result(AttemptResult("ExecutorError", "the executor failed; see its log"))

    def _update(self, **changes: Any) -> None:
        self.record = structs.replace(self.record, **changes)
        self._save(self.record)

    async def resume(self, running: RunningTask | None) -> None:
        """Continue a task of an earlier executor."""
        if self.record.is_final:
            return
        if self.record.state in (TaskPhase.STARTING, TaskPhase.RUNNING):
            end = AttemptResult(LOST, "the executor was restarted and did not find it again")
            if running is not None:
                self._update(state=TaskPhase.RUNNING, handle=running.handle)
                end = await self._wait_for_end(running)
            if not await self._retry(end):
                return
        elif self.record.state is TaskPhase.BACKING_OFF and not await self._back_off():
            return
        await self.run()

    async def run(self) -> None:
        """Run attempts until one succeeds, none is left, or the task is stopped."""
        while await self._retry(await self._attempt()):
            pass

    async def _attempt(self) -> AttemptResult:
        """Run the task once; return the result."""
        if self._stop.is_set():
            return AttemptResult(STOPPED, "it was stopped before it started")
        process = self.record.task.process
        hook = process.lifecycle.pre_start if process is not None else None
        # Saved before anything runs: a later executor sees that the command may have run.
        self._update(
            state=TaskPhase.STARTING,
            reason="",
            message="",
            started_at=_now(),
            exit_code=None,
            finished_at=None,
            handle="",
        )
        if hook is not None and (problem := await self._hook(hook)):
            return AttemptResult("PreStartHookFailed", problem, 1)
        argv = process.argv if process is not None else ()
        try:
            running = await self._launcher.launch(self.record, argv, self._log_path)
        except TaskLaunchError as error:
            return AttemptResult("StartFailed", str(error), 127)
        self._update(state=TaskPhase.RUNNING, handle=running.handle)
        return await self._wait_for_end(running)

    async def _wait_for_end(self, running: RunningTask) -> AttemptResult:
        """Wait for the end, the timeout or a stop request; return the result."""
        process = self.record.task.process
        ended = asyncio.ensure_future(running.wait())
        stopped = asyncio.ensure_future(self._stop.wait())
        try:
            limit = process.timeout_seconds if process is not None else None
            if limit is None:
                await asyncio.wait({ended, stopped}, return_when="FIRST_COMPLETED")
            else:
                await wait_running(
                    seconds_left(self.record, limit, _now()), limit, running, {ended, stopped}
                )
            if ended.done():
                code = ended.result()
                if code == 0:
                    return AttemptResult("Succeeded", "", 0)
                because = f": {running.cause}" if running.cause else ""
                return AttemptResult("Failed", f"exit code {code}{because}", code)
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

    async def _retry(self, end: AttemptResult) -> bool:
        """Save the result of an attempt; return whether another attempt follows."""
        process = self.record.task.process
        most = process.max_attempts if process is not None else 1
        tries = end.exit_code != 0 and end.reason != STOPPED and self.record.attempt < most
        if not tries or self._stop.is_set():
            await self._finish(end)
            return False
        self._record_result(end, state=TaskPhase.BACKING_OFF)
        return await self._back_off()

    async def _back_off(self) -> bool:
        """Wait before the next attempt; return false if the task was stopped meanwhile."""
        process = self.record.task.process
        base = process.backoff_seconds if process is not None else 1.0
        seconds = min(base * 2.0 ** (self.record.attempt - 1), BACKOFF_LIMIT_SECONDS)
        try:
            async with asyncio.timeout(seconds):
                await self._stop.wait()
        except TimeoutError:
            self._update(attempt=self.record.attempt + 1, state=TaskPhase.PENDING)
            return True
        await self._finish(AttemptResult(STOPPED, "it was stopped", 143))
        return False

    async def _finish(self, end: AttemptResult) -> None:
        process = self.record.task.process
        hook = process.lifecycle.post_stop if process is not None else None
        message = end.message
        if hook is not None and (problem := await self._hook(hook)):
            message = f"{message}; postStop: {problem}".lstrip("; ")
        self._record_result(AttemptResult(end.reason, message, end.exit_code))

    def _record_result(self, end: AttemptResult, *, state: TaskPhase | None = None) -> None:
        over = TaskPhase.SUCCEEDED if end.exit_code == 0 else TaskPhase.FAILED
        self._update(
            state=state or over,
            exit_code=end.exit_code,
            reason=end.reason,
            message=end.message,
            finished_at=_now(),
            is_final=state is None,
        )

    async def _hook(self, hook: TaskHook) -> str:
        """Run a hook; return the error, or an empty string."""
        try:
            running = await self._launcher.launch(
                self.record, hook.argv, self._log_path, is_hook=True
            )
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
