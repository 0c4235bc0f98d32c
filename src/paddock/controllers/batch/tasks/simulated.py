"""A task runner that runs nothing: tasks end on the loop's (virtual) time, as their words say.

`true` and anything unknown succeed, `false` fails, `exit N` ends with N, `sleep S` takes S seconds,
`fail-until N` fails before attempt N. For scale and for faults, like the simulated runtime.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator

from paddock.controllers.batch.tasks.runner import Order, Report, TaskRunner
from paddock.kit.clock import Clock
from paddock.kit.errors import UnavailableError
from paddock.resources.kinds.batch import TaskState
from paddock.resources.kinds.sandbox import Sandbox


class SimulatedTasks:
    """Tasks in memory."""

    def __init__(self, clock: Clock, *, run_seconds: float = 0.0) -> None:
        self._clock = clock
        self._run_seconds = run_seconds
        self._reports: dict[str, dict[str, Report]] = defaultdict(dict)
        self._running: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._changed: dict[str, asyncio.Event] = {}
        self.runs: Counter[str] = Counter()
        """How often each task was begun, all attempts counted."""
        self.unreachable: set[str] = set()
        """Uids of sandboxes that do not answer."""

    async def assign(
        self, sandbox: Sandbox, sandbox_id: str, orders: tuple[Order, ...]
    ) -> tuple[Report, ...]:
        """Begin what is new, end what is not wanted."""
        uid = self._reach(sandbox)
        wanted = {order.name for order in orders}
        for name in [name for name in self._reports[uid] if name not in wanted]:
            if (task := self._running.pop((uid, name), None)) is not None:
                task.cancel()
            del self._reports[uid][name]
        for order in orders:
            if order.name not in self._reports[uid]:
                self._begin(uid, order)
        return tuple(self._reports[uid].values())

    async def follow(self, sandbox: Sandbox, sandbox_id: str) -> AsyncIterator[tuple[Report, ...]]:
        """Give reports now and at every change."""
        while True:
            uid = self._reach(sandbox)
            event = self._changed.setdefault(uid, asyncio.Event())
            yield tuple(self._reports[uid].values())
            await event.wait()

    def close(self) -> None:
        """End what still runs: in memory it would outlive the sandboxes that are gone."""
        for task in tuple(self._running.values()):
            task.cancel()

    def _reach(self, sandbox: Sandbox) -> str:
        uid = sandbox.metadata.uid
        if uid in self.unreachable:
            raise UnavailableError("the simulated sandbox does not answer")
        return uid

    def _tell(self, uid: str, report: Report) -> None:
        self._reports[uid][report.name] = report
        if (event := self._changed.pop(uid, None)) is not None:
            event.set()

    def _begin(self, uid: str, order: Order) -> None:
        self._tell(uid, Report(name=order.name, state=TaskState.WAITING))
        task = asyncio.get_running_loop().create_task(self._run(uid, order), name=order.name)
        self._running[uid, order.name] = task
        task.add_done_callback(lambda _: self._running.pop((uid, order.name), None))

    async def _run(self, uid: str, order: Order) -> None:
        attempt = order.first_attempt
        while True:
            self.runs[order.name] += 1
            started = self._clock.now()
            self._tell(
                uid,
                Report(
                    name=order.name, state=TaskState.RUNNING, attempt=attempt, started_at=started
                ),
            )
            code, reason = await self._execute(order, attempt)
            final = code == 0 or attempt >= order.spec.max_attempts
            self._tell(
                uid,
                Report(
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
            await asyncio.sleep(order.spec.backoff_seconds * 2.0 ** (attempt - 1))
            attempt += 1

    async def _execute(self, order: Order, attempt: int) -> tuple[int, str]:
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


_: type[TaskRunner] = SimulatedTasks
