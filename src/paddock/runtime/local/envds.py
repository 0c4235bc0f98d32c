"""envds of a node: forked from a warm zygote when somebody calls, forgotten when idle.

The node holds each sandbox's listening socket. While no envd serves it, the first caller makes the
socket readable and an envd is forked; it ends by itself when idle and the node listens again. An
envd that was killed comes back the same way. envds outlive both the zygote and the node.
"""

import array
import asyncio
import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Coroutine, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from paddock.envd.initclient import take_channel
from paddock.kit.errors import PaddockError, UnavailableError
from paddock.kit.logs import fields
from paddock.runtime.local import rpc, state, wire
from paddock.runtime.local.premises import INNER_DOOR, Sockets
from paddock.runtime.local.wire import close_all

log = logging.getLogger(__name__)

_PATIENCE = 20.0
_FAREWELL = 1.0
"""How long somebody who is refused may take to read why."""
JOINED = ("userns", "mntns", "netns", "groups", "init")
"""What an envd needs of a sandbox: namespaces, where use is counted, and a way to its init."""
UNMADE = ("mntns", "init")
"""What of that a sandbox that is still being made has not."""
_BACK_OFF = (0.0, 0.05, 0.2, 1.0, 5.0)
"""Seconds to wait before the n-th start in a row that failed."""


class BrokenError(UnavailableError):
    """No envd can be started here, and trying again would not help."""


class _Reply(Struct, frozen=True, kw_only=True):
    id: str = ""
    op: str
    error: str = ""
    pid: int = 0
    status: int = 0


_decoder = msgspec.json.Decoder(_Reply)


class Waiter(Struct):
    """An envd that has joined a sandbox and waits there to hear whom it serves."""

    process: state.Process
    pidfd: int
    channel: socket.socket
    """It ends with this."""
    lacks: tuple[str, ...] = ()
    """What it has not joined, as that was still being made."""

    def close(self) -> None:
        """Let it end, unless it has work."""
        if self.pidfd >= 0:
            _kill(self.pidfd)
            self.pidfd = -1
        self.channel.close()


class Zygote:
    """The process envds are forked from."""

    def __init__(self, *, spares: int = 0) -> None:
        self._spares = spares
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._waiting: dict[str, asyncio.Future[tuple[_Reply, list[int]]]] = {}
        self._count = 0
        self._last_word = ""
        """Why it ended, where it could say so."""

    @property
    def pid(self) -> int | None:
        """Which process it is, while there is one."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start it if it is not there."""
        if self._control is not None:
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "paddock.envd.zygote_start",
                    "--fd",
                    str(theirs.fileno()),
                    "--spares",
                    str(self._spares),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                # Killed while it warms up, it leaves files: where the next node finds them.
                env=os.environ | {"TMPDIR": tempfile.gettempdir()},
            )
        ours.setblocking(False)
        self._control = ours
        self._last_word = ""
        asyncio.get_running_loop().add_reader(ours.fileno(), self._readable)

    async def fork(self, config: Mapping[str, object], fds: Mapping[str, int]) -> tuple[int, int]:
        """Fork an envd with these descriptors, by name; gives its pid and a pidfd."""
        self.start()
        if self._control is None:
            raise UnavailableError("the parent of envds does not run")
        self._count += 1
        ident = str(self._count)
        request = {"op": "start", "id": ident, "config": config, "fds": list(fds)}
        future: asyncio.Future[tuple[_Reply, list[int]]] = (
            asyncio.get_running_loop().create_future()
        )
        self._waiting[ident] = future
        try:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds.values()))]
            self._control.sendmsg([msgspec.json.encode(request)], rights, socket.MSG_NOSIGNAL)
            async with asyncio.timeout(_PATIENCE):
                reply, got = await future
        except OSError as problem:
            # Not among those who are told: we know.
            self._waiting.pop(ident, None)
            if not isinstance(problem, (BlockingIOError, TimeoutError)):
                self._lose()
            raise UnavailableError(f"no envd could be started: {problem}") from problem
        finally:
            self._waiting.pop(ident, None)
        if reply.op != "started" or len(got) != 1:
            close_all(got)
            raise UnavailableError(f"no envd could be started: {reply.error or reply.op}")
        return reply.pid, got[0]

    async def send_ahead(
        self, fds: Mapping[str, int], lacks: tuple[str, ...] = ()
    ) -> Waiter | None:
        """Have an envd join a sandbox by these descriptors, and wait there."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        try:
            with theirs:
                pid, pidfd = await self.fork({}, {"wait": theirs.fileno(), **fds})
        except BaseException:
            ours.close()
            raise
        if (process := state.identify(pid)) is None:
            os.close(pidfd)
            ours.close()
            return None
        return Waiter(process, pidfd, ours, lacks)

    def stop(self) -> None:
        """End it; envds go on."""
        self._lose()

    def _readable(self) -> None:
        if self._control is None:
            return
        try:
            data, fds = wire.receive(self._control)
        except BlockingIOError:
            return
        except OSError:  # it ended before it had read all that it was told
            data, fds = self._hear_out()
        if not data:
            self._lose()
            return
        reply = _decoder.decode(data)
        if reply.op == "broken":
            self._last_word = reply.error
            self._lose()
            return
        future = self._waiting.get(reply.id)
        if reply.op == "exited" or future is None or future.done():
            # Ends are seen through pidfds. One that nobody waits for any more must not serve.
            if fds and reply.op == "started":
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(fds[0], signal.SIGKILL)
            close_all(fds)
            return
        future.set_result((reply, fds))

    def _hear_out(self) -> tuple[bytes, list[int]]:
        """Read what it said itself, which the kernel gives after the error."""
        try:
            return wire.receive(self._control) if self._control else (b"", [])
        except OSError:
            return b"", []

    def _lose(self) -> None:
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control.fileno())
            self._control.close()
            self._control = None
        status = 0
        if self._process is not None:
            if self._process.poll() is None:
                self._process.kill()
            status = self._process.wait()
            self._process = None
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(self._why_lost(status))

    def _why_lost(self, status: int) -> UnavailableError:
        """One that ended by itself would do so again; one that was killed would not."""
        if status <= 0 and not self._last_word:
            return UnavailableError("the parent of envds died", retry_after_seconds=0.1)
        why = self._last_word or f"it ended with status {status}"
        return BrokenError(
            f"the parent of envds does not start: {why}",
            hint="the node's log has more; mend the installation",
        )


class Door:
    """Where one sandbox's envd is reached, whether or not it runs right now."""

    def __init__(
        self,
        zygote: Zygote,
        path: Path,
        sockets: Sockets | None = None,
        *,
        make: Callable[[Collection[str]], tuple[Mapping[str, object], Mapping[str, int]]],
        on_change: Callable[[state.Process | None], None],
        spawn: Callable[[str, Coroutine[Any, Any, None]], None],
    ) -> None:
        """`make` gives config and the descriptors asked for (see `JOINED`), ours to close.

        `sockets` are those that came with the directory, if any did.
        """
        self._zygote = zygote
        self._path = path
        self.control = path.with_name(INNER_DOOR)
        """The node's own way in, while an envd serves."""
        self._make = make
        self._on_change = on_change
        self._spawn = spawn
        self._loop = asyncio.get_running_loop()
        self._listener: socket.socket | None = sockets and sockets.outer
        self._inner: socket.socket | None = sockets and sockets.inner
        """The node's own, until an envd has it."""
        self._pidfd: int | None = None
        self._failures = 0
        self._began = 0.0
        self._at_rest = asyncio.Event()
        self._at_rest.set()
        self._is_open = False

    @property
    def is_serving(self) -> bool:
        """Say whether an envd runs."""
        return self._pidfd is not None

    def listen(self) -> None:
        """Let callers queue up, before there is anything to call."""
        self._listener = self._listener or rpc.listen(str(self._path))
        self._inner = self._inner or rpc.listen(str(self.control))

    def open(self, living: state.Process | None = None, waiter: Waiter | None = None) -> None:
        """Listen, taking over an envd that outlived an earlier node, or one that waits for us."""
        self._is_open = True
        if waiter is not None:
            self._listener = self._listener or rpc.listen(str(self._path))
            self._employ(waiter, self._listener)
            return
        pidfd = state.open_process(living)
        if pidfd is not None:
            listener = _take_listener(pidfd, living.pid if living else 0, self._path.name)
            if listener is not None:
                self._listener = listener
                self._watch(pidfd)
                return
            _kill(pidfd)
        self._listener = self._listener or rpc.listen(str(self._path))
        self._on_change(None)
        self._arm()

    def _employ(self, waiter: Waiter, listener: socket.socket) -> None:
        """Tell a waiting envd whom it serves. Callers queue up at the listener meanwhile."""
        config, held = self._make(waiter.lacks)
        with self._take_inner() as control, contextlib.ExitStack() as given:
            given.callback(close_all, list(held.values()))
            fds = {"listener": listener.fileno(), "control": control.fileno(), **held}
            request = {"op": "start", "config": config, "fds": list(fds)}
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds.values()))]
            try:
                waiter.channel.sendmsg([msgspec.json.encode(request)], rights, socket.MSG_NOSIGNAL)
            except OSError:  # it was killed: the first caller gets another
                waiter.close()
                self._on_change(None)
                self._arm()
                return
        self._watch(waiter.pidfd)
        waiter.pidfd = -1
        waiter.close()

    async def settle(self) -> None:
        """Wait until an envd that is being started is known to serve, or not to."""
        await self._at_rest.wait()

    def summon(self) -> None:
        """Have an envd started before anybody calls."""
        if self._is_open and self._pidfd is None:
            self._called()

    async def end(self) -> None:
        """End the envd, so that the next caller gets a new one; commands go on."""
        if self._pidfd is None:
            return
        pidfd = self._pidfd
        self._unwatch()
        _kill(pidfd, close=False)
        await wait_for_exit(pidfd)
        os.close(pidfd)
        self._arm()

    def close(self, *, kill: bool) -> None:
        """Stop listening. Without `kill` the envd goes on, for another node to find."""
        self._is_open = False
        if self._pidfd is not None:
            pidfd = self._pidfd
            self._unwatch()
            if kill:
                _kill(pidfd)
            else:
                os.close(pidfd)
        if self._listener is not None:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None
        if self._inner is not None:
            self._inner.close()
            self._inner = None
        if kill:
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()

    def _arm(self) -> None:
        if self._listener is not None and self._pidfd is None:
            self._loop.add_reader(self._listener.fileno(), self._called)

    def _called(self) -> None:
        if self._listener is not None:
            self._loop.remove_reader(self._listener.fileno())
        if self._at_rest.is_set():
            self._at_rest.clear()
            self._spawn(f"envd at {self._path}", self._start())

    async def _start(self) -> None:
        try:
            await asyncio.sleep(_BACK_OFF[min(self._failures, len(_BACK_OFF) - 1)])
            if self._listener is None or not self._is_open or self._pidfd is not None:
                return
            pid, pidfd = await self._fork(self._listener)
            if not self._is_open:
                _kill(pidfd)
                return
            self._watch(pidfd)
            self._on_change(state.identify(pid))
        except (PaddockError, OSError) as problem:
            log.warning("envd not started", extra=fields(path=self._path, reason=problem))
            if isinstance(problem, BrokenError):
                await self._refuse(str(problem))
            else:
                self._failures += 1
            self._arm()
        finally:
            self._at_rest.set()

    async def _refuse(self, why: str) -> None:
        """Tell all who have called that nobody will come; who calls later is another try."""
        body = msgspec.json.encode({"code": 503, "message": why})
        head = (
            "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        for caller in self._callers():
            with caller, contextlib.suppress(OSError):
                async with asyncio.timeout(_FAREWELL):
                    await self._loop.sock_sendall(caller, head.encode() + body)
                    caller.shutdown(socket.SHUT_WR)
                    while await self._loop.sock_recv(caller, 1 << 16):
                        pass

    def _callers(self) -> list[socket.socket]:
        """Take all who wait at the door now."""
        found: list[socket.socket] = []
        with contextlib.suppress(OSError):  # that was the last
            while self._listener is not None:
                caller, _ = self._listener.accept()
                caller.setblocking(False)
                found.append(caller)
        return found

    async def _fork(self, listener: socket.socket) -> tuple[int, int]:
        config, held = self._make(JOINED)
        try:
            with self._take_inner() as control:
                doors = {"listener": listener.fileno(), "control": control.fileno()}
                return await self._zygote.fork(config, {**doors, **held})
        finally:
            close_all(list(held.values()))

    def _take_inner(self) -> socket.socket:
        inner, self._inner = self._inner or rpc.listen(str(self.control)), None
        return inner

    def _watch(self, pidfd: int) -> None:
        self._pidfd = pidfd
        self._began = self._loop.time()
        self._loop.add_reader(pidfd, self._ended)

    def _unwatch(self) -> None:
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            self._pidfd = None

    def _ended(self) -> None:
        pidfd = self._pidfd
        self._unwatch()
        if pidfd is not None:
            os.close(pidfd)
        # One that lived a while did its work: the next starts at once.
        self._failures = 0 if self._loop.time() - self._began > 1.0 else self._failures + 1
        if self._is_open:
            self._on_change(None)
            self._arm()


def has_ended(pidfd: int) -> bool:
    """Say whether a process has ended, reaped or not."""
    watch = select.poll()
    watch.register(pidfd, select.POLLIN)
    return bool(watch.poll(0))


async def wait_for_exit(pidfd: int, *, seconds: float = _PATIENCE) -> None:
    """Wait until a process has ended."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    loop.add_reader(pidfd, lambda: None if ended.done() else ended.set_result(None))
    try:
        async with asyncio.timeout(seconds):
            await ended
    finally:
        loop.remove_reader(pidfd)


def _kill(pidfd: int, *, close: bool = True) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    if close:
        os.close(pidfd)


def _take_listener(pidfd: int, pid: int, name: str) -> socket.socket | None:
    """Copy the listening socket out of a living envd, found by the name it is bound to."""
    inodes: set[str] = set()
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        columns = line.split(maxsplit=7)
        # The kernel shows the path a socket was bound to, before it was moved to its place.
        bound = columns[7].rpartition("/")[2] if len(columns) == 8 else ""
        if name in (bound, bound.rpartition(".")[0]):
            inodes.add(columns[6])
    try:
        numbers = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return None
    for number in numbers:
        with contextlib.suppress(OSError):
            link = os.readlink(f"/proc/{pid}/fd/{number}")
            if link.startswith("socket:[") and link[8:-1] in inodes:
                taken = take_channel(pidfd, fd=int(number))
                if taken.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    return taken
                taken.close()
    return None
