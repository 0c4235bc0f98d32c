"""Every process of a sandbox that was started through envd: started, found, adopted, remembered.

A process that ended is remembered for a while, for clients that come late. What one process does
is `processes`' business, RPCs are `process_service`'s.
"""

import asyncio
import logging
from collections.abc import Coroutine, Iterator

import msgspec

from paddock.envd.process.init_protocol import MAX_MEMO
from paddock.envd.process.process import ManagedProcess, Subscription
from paddock.envd.process.spawner import ChildProcess, Command, ExitStatus, OnExit, Spawner
from paddock.envd.rpc.messages import ProcessConfig

log = logging.getLogger(__name__)

RETENTION_SECONDS = 30.0
PAUSED_SECONDS = 5.0
"""A sandbox that takes longer to answer has been paused, not busy."""
MAX_ENDED = 256
"""Of a flood of short commands only the latest are remembered: init's table is finite too."""


class ProcessRegistry:
    """Every process of this sandbox that was started through envd."""

    def __init__(self, spawner: Spawner) -> None:
        self._spawner = spawner
        self._processes: dict[int, ManagedProcess] = {}
        self._ended: dict[int, ManagedProcess] = {}
        self._background: set[asyncio.Task[None]] = set()

    def assign(self, spawner: Spawner) -> None:
        """Start processes by another way; nothing was started yet."""
        self._spawner = spawner

    def running(self) -> Iterator[ManagedProcess]:
        """Processes that have not ended."""
        yield from self._processes.values()

    def find(self, *, pid: int | None, tag: str | None, with_ended: bool) -> ManagedProcess | None:
        """Look one up; of several with a tag the latest."""
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
        """Run a command; the caller's subscription misses nothing.

        A caller who goes away meanwhile does not undo it: the command is started, kept and,
        after `timeout` seconds, killed, as if the caller had left a moment later.
        """
        process = ManagedProcess(config, tag)
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
        """Serve again what an earlier envd started; gives how many."""
        early: dict[int, ExitStatus] = {}
        known: dict[int, ManagedProcess] = {}

        def watcher(pid: int) -> OnExit:
            def ended(status: ExitStatus) -> None:
                if (process := known.get(pid)) is not None:
                    process.exited(status)
                else:
                    early[pid] = status

            return ended

        survivors = await self._spawner.attach(watcher)
        for survivor in survivors:
            memo = _read_memo(survivor.memo)
            process = ManagedProcess(memo.config, memo.tag)
            known[survivor.child.pid] = process
            self._adopt(process, survivor.child)
            status = survivor.exit or early.get(survivor.child.pid)
            if status is not None:
                process.exited(status)
            elif memo.timeout is not None:
                self._set_deadline(
                    process, memo.remaining(asyncio.get_running_loop().time()), memo.timeout
                )
        return len(survivors)

    def _set_deadline(self, process: ManagedProcess, seconds: float, timeout: float) -> None:
        process.call_at_deadline(
            seconds,
            lambda overdue: self._run(
                self._enforce_deadline(overdue, timeout), f"end {overdue.pid}"
            ),
        )

    async def _enforce_deadline(self, process: ManagedProcess, timeout: float) -> None:
        """Kill what is overdue; who slept through its deadline gets its time anew."""
        clock = asyncio.get_running_loop().time
        asked = clock()
        await process.wait_responsive()
        if process.end is None and clock() - asked > PAUSED_SECONDS:
            self._set_deadline(process, timeout, timeout)
        else:
            await process.time_out()

    def close(self) -> None:
        """Let go of every process; they go on."""
        for process in (*self._processes.values(), *self._ended.values()):
            process.release()
        for task in self._background:
            task.cancel()
        self._spawner.close()

    def _adopt(self, process: ManagedProcess, child: ChildProcess) -> None:
        process.on_end = self._on_end
        self._processes[child.pid] = process
        process.attach_child(child)

    def _on_end(self, process: ManagedProcess) -> None:
        self._processes.pop(process.pid, None)
        if (namesake := self._ended.get(process.pid)) is not None:
            self._expire(namesake)
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
            # Its caller hears of it too, if there still is one.
            log.info("%s: %s", task.get_name(), problem)


class _Memo(msgspec.Struct, omit_defaults=True):
    """What the next envd must know of a command."""

    config: ProcessConfig = ProcessConfig()
    tag: str | None = None
    timeout: float | None = None
    until: float | None = None
    """The deadline, by the clock of the machine that it was started on."""

    def remaining(self, now: float) -> float:
        """Give the seconds left; all of them to one that slept through its deadline."""
        timeout = self.timeout or 0.0
        left = (self.until or 0.0) - now
        return left if 0 < left <= timeout else timeout


def _read_memo(memo: bytes) -> _Memo:
    try:
        return msgspec.json.decode(memo or b"{}", type=_Memo)
    except msgspec.MsgspecError:
        return _Memo()
