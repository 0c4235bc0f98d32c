"""A process started through envd: output to subscribers, input, signals, end.

A `ManagedProcess` reads its pipes as fast as its slowest subscriber takes the data. Without a
subscriber output is discarded, so that the process never blocks. All data precede the end event.
The end event comes when the process has exited and its pipes are closed, or at once when it was
signalled: a grandchild that holds the pipe must not delay a kill. `registry.py` keeps all of them.
"""

import asyncio
import fcntl
import os
import signal
import struct
import termios
from collections.abc import Callable

from paddock.envd.memory_kills import MemoryKills
from paddock.envd.process.events import Subscription, data_event, end_event
from paddock.envd.process.init_protocol import SignalScope
from paddock.envd.process.spawner import ExitStatus, SpawnedProcess
from paddock.envd.rpc.messages import EndEvent, ProcessConfig, ProcessEvent

PIPE_CHUNK = 32 << 10
PTY_CHUNK = 16 << 10
HIGH_WATER = 1 << 20
LOW_WATER = 256 << 10
_READS_PER_TURN = 8
_DRAIN_LIMIT = 1 << 20
_KILLED_CODE = 128 + signal.SIGKILL
"""The exit code of a shell whose command was killed."""


class StdinError(Exception):
    """Input cannot be delivered; the message is for the client."""


class ManagedProcess:
    """One process: running, or ended and retained for a while."""

    def __init__(
        self, config: ProcessConfig, tag: str | None, memory_kills: MemoryKills | None = None
    ) -> None:
        self.config = config
        self.tag = tag
        self.cause: str | None = None
        """Why the process was killed, if not by a client: the memory that was used up."""
        self._memory_kills = memory_kills
        self._kills_before = memory_kills.count() if memory_kills else 0
        self.pid = 0
        self.end: EndEvent | None = None
        self.is_pty = False
        self.on_end: Callable[[ManagedProcess], None] | None = None
        self.on_leader_exit: Callable[[ExitStatus], None] | None = None
        """Called at the exit of the process itself, even if others still hold its pipes."""
        self._loop = asyncio.get_running_loop()
        self._child: SpawnedProcess | None = None
        self._open: dict[str, int] = {}
        self._stdin: int | None = None
        self._stdin_lock = asyncio.Lock()
        self._subscribers: set[Subscription] = set()
        self._exit: ExitStatus | None = None
        self._is_signalled = False
        self._is_paused = False
        self._deadline: asyncio.TimerHandle | None = None
        self.is_timed_out = False

    # -- lifecycle

    def attach_child(self, child: SpawnedProcess) -> None:
        """Start reading the output of the started command."""
        self._child = child
        self.pid = child.pid
        self._open = dict(child.outputs)
        self._stdin = child.stdin
        self.is_pty = "pty" in self._open
        for name, fd in self._open.items():
            self._loop.add_reader(fd, self._readable, name, fd)
        if self._exit is not None:
            self._end_if_complete()

    def exited(self, status: ExitStatus) -> None:
        """Record the exit of the process itself; its pipes may still be open."""
        self._exit = status
        self.cause = None if self._is_signalled else self._memory_cause(status)
        if status.signal in (signal.SIGKILL, signal.SIGTERM):
            self._is_signalled = True
        if self.on_leader_exit is not None:
            self.on_leader_exit(status)
        if self._child is not None:
            self._end_if_complete()

    def _memory_cause(self, status: ExitStatus) -> str | None:
        """Return the cause of a kill for lack of memory since the process was started."""
        is_killed = status.signal == signal.SIGKILL or status.code == _KILLED_CODE
        if not is_killed or self._memory_kills is None:
            return None
        kills = self._memory_kills.count()
        return self._memory_kills.cause() if kills > self._kills_before else None

    @property
    def leader_exit(self) -> ExitStatus | None:
        """The exit of the process itself, or `None` while it runs."""
        return self._exit

    async def signal(self, number: int, scope: SignalScope = SignalScope.PROCESS) -> None:
        """Send a signal; SIGKILL and SIGTERM end the stream even if a pipe stays open."""
        if self._child is None or (self.end is not None and scope is not SignalScope.TREE):
            return
        if number in (signal.SIGKILL, signal.SIGTERM):
            self._is_signalled = True
        await self._child.signal(number, scope)
        if self._exit is not None:
            self._end_if_complete()

    def call_at_deadline(self, seconds: float, call: Callable[["ManagedProcess"], object]) -> None:
        """Call back if the process still runs after this many seconds."""
        self._deadline = self._loop.call_later(seconds, call, self)

    async def wait_responsive(self) -> None:
        """Return once the sandbox responds: at once, or when it is resumed."""
        if self._child is not None:
            await self._child.wait_responsive()

    async def time_out(self) -> None:
        """Kill the process because its deadline has passed."""
        if self.end is None:
            self.is_timed_out = True
            await self.signal(signal.SIGKILL)

    async def forget(self) -> None:
        """Release what init keeps of the process."""
        if self._child is not None:
            await self._child.forget()

    def release(self) -> None:
        """Close the descriptors; the process keeps running."""
        if self._deadline is not None:
            self._deadline.cancel()
        for name in tuple(self._open):
            self._close_output(name)
        self._close_stdin()

    # -- output

    def subscribe(self) -> Subscription:
        """Return a subscription to further events; an ended process sends its end at once."""
        subscription = Subscription(self.resume)
        if self.end is not None:
            subscription.push(ProcessEvent(end=self.end), 0)
        else:
            self._subscribers.add(subscription)
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        self._subscribers.discard(subscription)
        self.resume()

    def resume(self) -> None:
        """Resume reading if every subscriber is below the low-water mark."""
        if self._is_paused and all(s.buffered < LOW_WATER for s in self._subscribers):
            self._is_paused = False
            for name, fd in self._open.items():
                self._loop.add_reader(fd, self._readable, name, fd)

    def _readable(self, name: str, fd: int) -> None:
        for _ in range(_READS_PER_TURN):
            has_more = self._read_once(name, fd)
            if any(s.buffered > HIGH_WATER for s in self._subscribers):
                self._pause()
                return
            if not has_more:
                return

    def _read_once(self, name: str, fd: int) -> bool:
        """Read one chunk; return whether more may be available now."""
        size = PTY_CHUNK if name == "pty" else PIPE_CHUNK
        try:
            data = os.read(fd, size)
        except BlockingIOError:
            return False
        except OSError:
            data = b""  # EIO: the last holder of the terminal closed it
        if not data:
            self._close_output(name)
            self._end_if_complete()
            return False
        if self._subscribers:
            event = ProcessEvent(data=data_event(name, data))
            for subscriber in self._subscribers:
                subscriber.push(event, len(data))
        return len(data) == size or name == "pty"

    def _pause(self) -> None:
        self._is_paused = True
        for fd in self._open.values():
            self._loop.remove_reader(fd)

    def _close_output(self, name: str) -> None:
        fd = self._open.pop(name)
        self._loop.remove_reader(fd)
        os.close(fd)

    def _end_if_complete(self) -> None:
        """Send the end event once the process has exited and its output is complete."""
        if self._exit is None or self.end is not None:
            return
        if self._open and not self._is_signalled:
            return
        self.end = end_event(self._exit, self.cause)  # before draining, which calls this again
        self._drain()
        if self.cause:
            self._print_cause(self.cause)
        if self._deadline is not None:
            self._deadline.cancel()
        for name in tuple(self._open):
            self._close_output(name)
        self._close_stdin()
        for subscriber in self._subscribers:
            subscriber.push(ProcessEvent(end=self.end), 0)
        self._subscribers.clear()
        if self.on_end is not None:
            self.on_end(self)

    def _print_cause(self, cause: str) -> None:
        """Send the cause as the last output: some clients show that and not the end's error."""
        line = f"killed: {cause}"
        data = f"{line}\r\n".encode() if self.is_pty else f"{line}\n".encode()
        event = ProcessEvent(data=data_event("pty" if self.is_pty else "stderr", data))
        for subscriber in self._subscribers:
            subscriber.push(event, len(data))

    def _drain(self) -> None:
        """Read what is in the pipes now, and no more than a pipe holds."""
        for name, fd in tuple(self._open.items()):
            taken = 0
            while taken < _DRAIN_LIMIT and name in self._open:
                if not self._read_once(name, fd):
                    break
                taken += PIPE_CHUNK

    # -- input

    async def write(self, data: bytes, *, to_pty: bool) -> None:
        """Write all data; wait while the process does not read."""
        async with self._stdin_lock:
            fd = self._input_fd(to_pty=to_pty)
            view = memoryview(data)
            while view:
                try:
                    view = view[os.write(fd, view[:PIPE_CHUNK]) :]
                except BlockingIOError:
                    await self._writable(fd)
                    fd = self._input_fd(to_pty=to_pty)
                except OSError as error:
                    raise StdinError(f"cannot write to process {self.pid}: {error}") from error

    async def close_input(self) -> None:
        """Close standard input, so that the process reads end-of-file."""
        if self.is_pty:
            raise StdinError(
                "a terminal's input cannot be closed: send Ctrl+D (0x04) to it instead"
            )
        async with self._stdin_lock:
            if self._stdin is None:
                raise StdinError("standard input is closed or was never connected")
            self._close_stdin()
            if self._child is not None:
                await self._child.close_stdin()

    def resize(self, columns: int, rows: int) -> None:
        """Set the size of the terminal."""
        if not self.is_pty or "pty" not in self._open:
            raise StdinError(f"process {self.pid} has no terminal")
        size = struct.pack("HHHH", rows & 0xFFFF, columns & 0xFFFF, 0, 0)
        fcntl.ioctl(self._open["pty"], termios.TIOCSWINSZ, size)

    def _input_fd(self, *, to_pty: bool) -> int:
        if to_pty:
            if "pty" not in self._open:
                raise StdinError(f"process {self.pid} has no terminal")
            return self._open["pty"]
        if self.is_pty:
            raise StdinError(f"process {self.pid} has a terminal: send its input as pty")
        if self._stdin is None:
            raise StdinError("standard input is closed or was never connected")
        return self._stdin

    async def _writable(self, fd: int) -> None:
        waiter: asyncio.Future[None] = self._loop.create_future()
        # A duplicate, because a terminal's descriptor is already registered for reading.
        copy = os.dup(fd)
        self._loop.add_writer(copy, _set, waiter)
        try:
            await waiter
        finally:
            self._loop.remove_writer(copy)
            os.close(copy)

    def _close_stdin(self) -> None:
        if self._stdin is not None:
            os.close(self._stdin)
            self._stdin = None


def _set(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)
