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
import socket
from collections.abc import Callable, Collection, Coroutine, Mapping
from pathlib import Path
from typing import Any

import msgspec

from paddock.envd.process.init_client import take_channel
from paddock.kit.errors import PaddockError
from paddock.kit.logs import fields
from paddock.runtime.local.envd.zygote import BrokenError, Waiter, Zygote
from paddock.runtime.local.kernel import pidfds
from paddock.runtime.local.node import records, rpc
from paddock.runtime.local.sandbox.socket_dirs import INNER_DOOR, Sockets
from paddock.wire.seqpacket import close_all

log = logging.getLogger(__name__)

_FAREWELL = 1.0
"""How long somebody who is refused may take to read why."""
JOINED = ("userns", "mntns", "netns", "groups", "init")
"""What an envd needs of a sandbox: namespaces, where use is counted, and a way to its init."""
UNMADE = ("mntns", "init")
"""What of that a sandbox that is still being made has not."""
_BACK_OFF = (0.0, 0.05, 0.2, 1.0, 5.0)
"""Seconds to wait before the n-th start in a row that failed."""


class Door:
    """Where one sandbox's envd is reached, whether or not it runs right now."""

    def __init__(
        self,
        zygote: Zygote,
        path: Path,
        sockets: Sockets | None = None,
        *,
        make: Callable[[Collection[str]], tuple[Mapping[str, object], Mapping[str, int]]],
        on_change: Callable[[records.Process | None], None],
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

    def open(self, living: records.Process | None = None, waiter: Waiter | None = None) -> None:
        """Listen, taking over an envd that outlived an earlier node, or one that waits for us."""
        self._is_open = True
        if waiter is not None:
            self._listener = self._listener or rpc.listen(str(self._path))
            self._employ(waiter, self._listener)
            return
        pidfd = records.open_process(living)
        if pidfd is not None:
            listener = _take_listener(pidfd, living.pid if living else 0, self._path.name)
            if listener is not None:
                self._listener = listener
                self._watch(pidfd)
                return
            pidfds.kill(pidfd)
        self._listener = self._listener or rpc.listen(str(self._path))
        self._changed(None)
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
                self._changed(None)
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
        pidfds.kill(pidfd, close=False)
        await pidfds.wait_for_exit(pidfd)
        os.close(pidfd)
        self._arm()

    def close(self, *, kill: bool) -> None:
        """Stop listening. Without `kill` the envd goes on, for another node to find."""
        self._is_open = False
        if self._pidfd is not None:
            pidfd = self._pidfd
            self._unwatch()
            if kill:
                pidfds.kill(pidfd)
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
                pidfds.kill(pidfd)
                return
            self._watch(pidfd)
            self._changed(records.identify(pid))
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
        async with asyncio.TaskGroup() as tasks:
            for caller in self._callers():
                tasks.create_task(self._send_away(caller, head.encode() + body))

    async def _send_away(self, caller: socket.socket, answer: bytes) -> None:
        with caller, contextlib.suppress(OSError):
            async with asyncio.timeout(_FAREWELL):
                await self._loop.sock_sendall(caller, answer)
                caller.shutdown(socket.SHUT_WR)
                while await self._loop.sock_recv(caller, 1 << 16):
                    pass

    def _callers(self) -> list[socket.socket]:
        """Take all who wait at the door now."""
        found: list[socket.socket] = []
        try:
            while self._listener is not None:
                caller, _ = self._listener.accept()
                caller.setblocking(False)
                found.append(caller)
        except BlockingIOError:  # that was the last
            pass
        except OSError:  # no descriptors: the others call on, and are looked after later
            self._failures += 1
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

    def _changed(self, process: records.Process | None) -> None:
        """Have it written down who serves.

        A full disk must not keep callers out; and whoever reads an old record looks whether that
        process is there.
        """
        try:
            self._on_change(process)
        except OSError as problem:
            log.warning("envd not written down", extra=fields(path=self._path, reason=problem))

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
            self._changed(None)
            self._arm()


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
