"""All processes of a sandbox that were started through envd.

Ended processes are retained for a while, for clients that connect late. One process is in
`process.py`, the RPC methods are in `rpc/process_service.py`.
"""

import asyncio
import logging
from collections.abc import Coroutine, Iterator

import msgspec

from paddock.envd.memory_kills import MemoryKills
from paddock.envd.process.events import Subscription
from paddock.envd.process.init_protocol import MAX_MEMO
from paddock.envd.process.process import ManagedProcess
from paddock.envd.process.spawner import Command, ExitStatus, OnExit, SpawnedProcess, Spawner
from paddock.envd.rpc.messages import ProcessConfig

log = logging.getLogger(__name__)

RETENTION_SECONDS = 30.0
PAUSED_SECONDS = 5.0
"""A sandbox that takes longer to respond was paused, not busy."""
MAX_ENDED = 256
"""The number of ended processes that are retained; init's table is finite too."""


class ProcessRegistry:
    """Starts, finds and retains processes."""

    def __init__(self, spawner: Spawner, memory_kills: MemoryKills | None = None) -> None:
        self._spawner = spawner
        self.memory_kills = memory_kills
        """Counts the OOM kills of the sandbox; `None` if they are not known."""
        self._processes: dict[int, ManagedProcess] = {}
        self._ended: dict[int, ManagedProcess] = {}
        self._background: set[asyncio.Task[None]] = set()

    def assign(self, spawner: Spawner) -> None:
        """Set the spawner; called before any process is started."""
        self._spawner = spawner

    def running(self) -> Iterator[ManagedProcess]:
        yield from self._processes.values()

    def find(self, *, pid: int | None, tag: str | None, with_ended: bool) -> ManagedProcess | None:
        """Return a process by pid or tag; of several with the same tag the latest."""
        places = (self._processes, self._ended) if with_ended else (self._processes,)
        for place in places:
            if pid is not None and pid in place:
                return place[pid]
            if pid is None and tag is not None:
                for process in reversed(place.values()):
                    if process.tag == tag:
                        return process
        return None

    async def start(
        self,
        command: Command,
        config: ProcessConfig,
        tag: str | None,
        *,
        timeout: float | None = None,
    ) -> tuple[ManagedProcess, Subscription]:
        """Start a command; the returned subscription receives all of its events.

        If the caller is cancelled meanwhile, the command is still started and retained, and killed
        after `timeout` seconds.
        """
        process = ManagedProcess(config, tag, self.memory_kills)
        subscription = process.subscribe()
        until = None if timeout is None else asyncio.get_running_loop().time() + timeout
        memo = msgspec.json.encode(_Memo(config=config, tag=tag, timeout=timeout, until=until))
        command = msgspec.structs.replace(command, memo=memo if len(memo) < MAX_MEMO else b"{}")
        starting = self._run(self._start(process, command, timeout), f"start {config.cmd}")
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            process.unsubscribe(subscription)
            raise
        return process, subscription

    async def _start(
        self, process: ManagedProcess, command: Command, timeout: float | None
    ) -> None:
        self._adopt(process, await self._spawner.spawn(command, process.exited))
        if timeout is not None and process.end is None:
            self._set_deadline(process, timeout, timeout)

    async def attach(self) -> int:
        """Adopt the processes of an earlier envd; return their number."""
        early: dict[int, ExitStatus] = {}
        known: dict[int, ManagedProcess] = {}

        def watcher(pid: int) -> OnExit:
            def ended(status: ExitStatus) -> None:
                if (process := known.get(pid)) is not None:
                    process.exited(status)
                else:
                    early[pid] = status

            return ended

        inherited = await self._spawner.attach(watcher)
        for item in inherited:
            memo = _read_memo(item.memo)
            process = ManagedProcess(memo.config, memo.tag, self.memory_kills)
            known[item.child.pid] = process
            self._adopt(process, item.child)
            status = item.exit or early.get(item.child.pid)
            if status is not None:
                process.exited(status)
            elif memo.timeout is not None:
                self._set_deadline(
                    process, memo.remaining(asyncio.get_running_loop().time()), memo.timeout
                )
        return len(inherited)

    def _set_deadline(self, process: ManagedProcess, seconds: float, timeout: float) -> None:
        process.call_at_deadline(
            seconds,
            lambda overdue: self._run(
                self._enforce_deadline(overdue, timeout), f"end {overdue.pid}"
            ),
        )

    async def _enforce_deadline(self, process: ManagedProcess, timeout: float) -> None:
        """Kill an overdue process; if the sandbox was paused meanwhile, restart its deadline."""
        clock = asyncio.get_running_loop().time
        asked_at = clock()
        await process.wait_responsive()
        if process.end is None and clock() - asked_at > PAUSED_SECONDS:
            self._set_deadline(process, timeout, timeout)
        else:
            await process.time_out()

    def close(self) -> None:
        """Release all processes; they keep running."""
        for process in (*self._processes.values(), *self._ended.values()):
            process.release()
        for task in self._background:
            task.cancel()
        self._spawner.close()

    def _adopt(self, process: ManagedProcess, child: SpawnedProcess) -> None:
        process.on_end = self._on_end
        self._processes[child.pid] = process
        process.attach_child(child)

    def _on_end(self, process: ManagedProcess) -> None:
        self._processes.pop(process.pid, None)
        if (previous := self._ended.get(process.pid)) is not None:
            self._expire(previous)
        elif len(self._ended) >= MAX_ENDED:
            self._expire(next(iter(self._ended.values())))
        self._ended[process.pid] = process
        loop = asyncio.get_running_loop()
        loop.call_later(RETENTION_SECONDS, self._expire, process)

    def _expire(self, process: ManagedProcess) -> None:
        if self._ended.get(process.pid) is process:
            del self._ended[process.pid]
            self._run(process.forget(), f"forget {process.pid}")

    def _run(self, work: Coroutine[None, None, None], name: str) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._background.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._background.discard(task)
        if not task.cancelled() and (problem := task.exception()) is not None:
            # The caller gets the error too, if it still waits.
            log.info(
                "background work failed", extra={"work": task.get_name(), "error": str(problem)}
            )


class _Memo(msgspec.Struct, omit_defaults=True):
    """The data that the next envd needs to serve a command."""

    config: ProcessConfig = ProcessConfig()
    tag: str | None = None
    timeout: float | None = None
    until: float | None = None
    """The deadline, on the monotonic clock of the machine that started the command."""

    def remaining(self, now: float) -> float:
        """Return the seconds left; the full timeout if the deadline passed while paused."""
        timeout = self.timeout or 0.0
        left = (self.until or 0.0) - now
        return left if 0 < left <= timeout else timeout


def _read_memo(memo: bytes) -> _Memo:
    try:
        return msgspec.json.decode(memo or b"{}", type=_Memo)
    except msgspec.MsgspecError:
        return _Memo()
