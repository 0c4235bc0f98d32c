"""A task runner that runs nothing: tasks end in virtual time, as their command says.

`true` and unknown commands succeed, `false` fails, `exit N` ends with N, `sleep S` takes S seconds,
`fail-until N` fails before attempt N. Used for scale and fault tests, like the simulated runtime.
"""

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import AsyncIterator

from paddock.controllers.batch.tasks.runner import TaskOrder, TaskReport, TaskRunner
from paddock.kit.backoff import Backoff
from paddock.kit.clock import Clock
from paddock.kit.errors import UnavailableError
from paddock.resources.kinds.batch import TaskState
from paddock.resources.kinds.sandbox import Sandbox


class SimulatedTasks:
    """Keeps tasks in memory."""

    def __init__(self, clock: Clock, *, run_seconds: float = 0.0) -> None:
        self._clock = clock
        self._run_seconds = run_seconds
        self._reports: dict[str, dict[str, TaskReport]] = defaultdict(dict)
        self._running: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._changed: dict[str, asyncio.Event] = {}
        self.runs: Counter[str] = Counter()
        """Number of starts of each task, all attempts counted."""
        self.unreachable: set[str] = set()
        """Uids of sandboxes that do not respond."""

    async def assign(
        self, sandbox: Sandbox, sandbox_id: str, orders: tuple[TaskOrder, ...]
    ) -> tuple[TaskReport, ...]:
        """Start new tasks, cancel those that are not wanted."""
        uid = self._reach(sandbox)
        wanted = {order.name for order in orders}
        for name in [name for name in self._reports[uid] if name not in wanted]:
            if (task := self._running.pop((uid, name), None)) is not None:
                task.cancel()
            del self._reports[uid][name]
        for order in orders:
            if order.name not in self._reports[uid]:
                self._start(uid, order)
        return tuple(self._reports[uid].values())

    async def watch(
        self, sandbox: Sandbox, sandbox_id: str
    ) -> AsyncIterator[tuple[TaskReport, ...]]:
        """Yield the reports now and on every change."""
        while True:
            uid = self._reach(sandbox)
            event = self._changed.setdefault(uid, asyncio.Event())
            yield tuple(self._reports[uid].values())
            await event.wait()

    def close(self) -> None:
        """Cancel running tasks: in memory they would outlive their sandboxes."""
        for task in tuple(self._running.values()):
            task.cancel()

    def _reach(self, sandbox: Sandbox) -> str:
        uid = sandbox.metadata.uid
        if uid in self.unreachable:
            raise UnavailableError("the simulated sandbox does not respond")
        return uid

    def _report(self, uid: str, report: TaskReport) -> None:
        self._reports[uid][report.name] = report
        if (event := self._changed.pop(uid, None)) is not None:
            event.set()

    def _start(self, uid: str, order: TaskOrder) -> None:
        self._report(uid, TaskReport(name=order.name, state=TaskState.WAITING))
        task = asyncio.get_running_loop().create_task(self._run(uid, order), name=order.name)
        self._running[uid, order.name] = task
        task.add_done_callback(lambda _: self._running.pop((uid, order.name), None))

    async def _run(self, uid: str, order: TaskOrder) -> None:
        attempt = order.first_attempt
        while True:
            self.runs[order.name] += 1
            started = self._clock.now()
            self._report(
                uid,
                TaskReport(
                    name=order.name, state=TaskState.RUNNING, attempt=attempt, started_at=started
                ),
            )
            code, reason = await self._execute(order, attempt)
            final = code == 0 or attempt >= order.spec.max_attempts
            self._report(
                uid,
                TaskReport(
                    name=order.name,
                    state=TaskState.SUCCEEDED if code == 0 else TaskState.FAILED,
                    attempt=attempt,
                    exit_code=code,
                    reason=reason,
                    started_at=started,
                    finished_at=self._clock.now(),
                    output_head=" ".join(order.spec.process.command),
                    is_final=final,
                ),
            )
            if final:
                return
            await asyncio.sleep(_backoff(order).delay(attempt))
            attempt += 1

    async def _execute(self, order: TaskOrder, attempt: int) -> tuple[int, str]:
        word, *rest = (*order.spec.process.command, *order.spec.process.args)
        seconds = float(rest[0]) if word == "sleep" and rest else self._run_seconds
        limit = order.spec.timeout_seconds
        if limit is not None and seconds > limit:
            await asyncio.sleep(limit)
            return 137, "TaskTimeout"
        if seconds:
            await asyncio.sleep(seconds)
        code = {"false": 1, "exit": int(rest[0]) if word == "exit" and rest else 0}.get(word, 0)
        if word == "fail-until" and rest:
            code = 1 if attempt < int(rest[0]) else 0
        return code, "Failed" if code else "Succeeded"


def _backoff(order: TaskOrder) -> Backoff:
    return Backoff(base_seconds=order.spec.backoff_seconds, cap_seconds=math.inf, jitter=0.0)


_: type[TaskRunner] = SimulatedTasks
