"""The listener of one sandbox's envd: forks envd from the zygote on the first connection.

The node holds each sandbox's listening socket. While no envd serves it, the first connection makes
the socket readable and an envd is forked. An idle envd exits, and the node listens again; a killed
envd is replaced in the same way. The socket for code inside the sandbox is held in the same way
(`inside_socket.py`). envds outlive both the zygote and the node.
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
from paddock.runtime.local.envd.inside_socket import InsideSocket
from paddock.runtime.local.envd.zygote import WaitingEnvd, ZygoteBrokenError, ZygoteProcess
from paddock.runtime.local.kernel import pidfds
from paddock.runtime.local.node import records, rpc
from paddock.runtime.local.sandbox.socket_dirs import CONTROL_SOCKET, EnvdSockets
from paddock.wire.seqpacket import close_all

log = logging.getLogger(__name__)

_REJECT_SECONDS = 1.0
"""Seconds for a rejected caller to read the response."""
ENVD_PARTS = ("userns", "mntns", "netns", "groups", "init")
"""What an envd needs of a sandbox: namespaces, cgroups to read usage from, a channel to init."""
PARTS_OF_RUNNING_INIT = ("mntns", "init")
"""The parts that do not exist before init runs."""
_BACKOFF_SECONDS = (0.0, 0.05, 0.2, 1.0, 5.0)
"""Seconds before a start, by the number of consecutive failures."""
_INSIDE_SECONDS = 120.0
"""Seconds between starts that code inside the sandbox causes: all of it may connect. Longer than an
idle envd runs, so that connections alone do not keep one in memory."""


class EnvdListener:
    """Listens on the socket of one sandbox's envd and starts envd on demand."""

    def __init__(
        self,
        zygote: ZygoteProcess,
        path: Path,
        sockets: EnvdSockets | None = None,
        *,
        open_parts: Callable[[Collection[str]], tuple[Mapping[str, object], Mapping[str, int]]],
        on_change: Callable[[records.RecordedProcess | None], None],
        spawn: Callable[[str, Coroutine[Any, Any, None]], None],
        open_inside: Callable[[], socket.socket | None] = lambda: None,
    ) -> None:
        """`open_parts` returns envd's config and descriptors of the given parts (`ENVD_PARTS`),
        which the listener closes. `open_inside` returns the socket for code inside, if possible.

        `sockets` are the prepared ones of the sandbox's directory, if any.
        """
        self._zygote = zygote
        self._path = path
        self.control = path.with_name(CONTROL_SOCKET)
        """The socket for calls of the node itself, while an envd serves."""
        self._open_parts = open_parts
        self._on_change = on_change
        self._spawn = spawn
        self._inside = InsideSocket(open_inside)
        self._watched: list[int] = []
        """Descriptors of the sockets on which a connection starts an envd."""
        self._loop = asyncio.get_running_loop()
        self._listener: socket.socket | None = sockets and sockets.envd
        self._control: socket.socket | None = sockets and sockets.control
        """Held until it is passed to an envd."""
        self._pidfd: int | None = None
        self._failures = 0
        self._inside_at = float("-inf")
        """When code inside the sandbox last caused a start."""
        self._inside_timer: asyncio.TimerHandle | None = None
        self._started_at = 0.0
        self._settled = asyncio.Event()
        self._settled.set()
        self._is_open = False

    @property
    def is_serving(self) -> bool:
        """Whether an envd runs."""
        return self._pidfd is not None

    def listen(self) -> None:
        """Bind the sockets, so that connections queue before envd can start."""
        self._listener = self._listener or rpc.listen(str(self._path))
        self._control = self._control or rpc.listen(str(self.control))

    def open(
        self,
        running: records.RecordedProcess | None = None,
        waiting_envd: WaitingEnvd | None = None,
    ) -> None:
        """Listen; adopt an envd that a previous node started, or attach a waiting one."""
        self._is_open = True
        if waiting_envd is not None:
            self._listener = self._listener or rpc.listen(str(self._path))
            self._attach(waiting_envd, self._listener)
            return
        pidfd = records.open_process(running)
        if pidfd is not None:
            listener = _take_listener(pidfd, running.pid if running else 0, self._path.name)
            if listener is not None:
                self._listener = listener
                self._watch(pidfd)
                return
            pidfds.kill(pidfd)
        self._listener = self._listener or rpc.listen(str(self._path))
        self._report_process(None)
        self._watch_listener()

    def _attach(self, waiting_envd: WaitingEnvd, listener: socket.socket) -> None:
        """Send a waiting envd its config and sockets. Connections queue meanwhile."""
        config, held = self._open_parts(waiting_envd.missing)
        with self._take_control() as control, contextlib.ExitStack() as given:
            given.callback(close_all, list(held.values()))
            fds = {**self._sockets(listener, control), **held}
            request = {"op": "start", "config": config, "fds": list(fds)}
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds.values()))]
            try:
                waiting_envd.channel.sendmsg(
                    [msgspec.json.encode(request)], rights, socket.MSG_NOSIGNAL
                )
            except OSError:  # it was killed: the next connection starts another
                waiting_envd.close()
                self._report_process(None)
                self._watch_listener()
                return
        self._watch(waiting_envd.pidfd)
        waiting_envd.pidfd = -1
        waiting_envd.close()

    async def ready(self) -> None:
        """Wait until no start is in progress; envd then serves, or failed to start."""
        await self._settled.wait()

    def start(self) -> None:
        """Start envd before the first connection."""
        if self._is_open and self._pidfd is None:
            self._on_connection()

    async def end(self) -> None:
        """Kill envd; the next connection starts a new one. Commands keep running."""
        if self._pidfd is None:
            return
        pidfd = self._pidfd
        self._unwatch()
        pidfds.kill(pidfd, close=False)
        await pidfds.wait_for_exit(pidfd)
        os.close(pidfd)
        self._watch_listener()

    def close(self, *, kill: bool) -> None:
        """Stop listening. Without `kill`, envd keeps running for the next node to adopt."""
        self._is_open = False
        if self._pidfd is not None:
            pidfd = self._pidfd
            self._unwatch()
            if kill:
                pidfds.kill(pidfd)
            else:
                os.close(pidfd)
        self._unwatch_sockets()
        self._inside.close()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._control is not None:
            self._control.close()
            self._control = None
        if kill:
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()

    def _watch_listener(self) -> None:
        if self._listener is None or self._pidfd is not None:
            return
        self._unwatch_sockets()
        self._loop.add_reader(self._listener.fileno(), self._on_connection)
        self._watched.append(self._listener.fileno())
        # A connection waits until another start is allowed, or somebody else causes one.
        wait = self._inside_at + _INSIDE_SECONDS - self._loop.time()
        if wait > 0:
            self._inside_timer = self._loop.call_later(wait, self._watch_inside)
        else:
            self._watch_inside()

    def _watch_inside(self) -> None:
        inside = self._inside.get()
        if inside is not None:
            self._loop.add_reader(inside.fileno(), self._on_inside_connection)
            self._watched.append(inside.fileno())

    def _unwatch_sockets(self) -> None:
        for fd in self._watched:
            self._loop.remove_reader(fd)
        self._watched.clear()
        if self._inside_timer is not None:
            self._inside_timer.cancel()
            self._inside_timer = None

    def _on_inside_connection(self) -> None:
        self._inside_at = self._loop.time()
        self._on_connection()

    def _on_connection(self) -> None:
        self._unwatch_sockets()
        if self._settled.is_set():
            self._settled.clear()
            self._spawn(f"envd at {self._path}", self._fork_envd())

    async def _fork_envd(self) -> None:
        try:
            await asyncio.sleep(_BACKOFF_SECONDS[min(self._failures, len(_BACKOFF_SECONDS) - 1)])
            if self._listener is None or not self._is_open or self._pidfd is not None:
                return
            pid, pidfd = await self._fork_from_zygote(self._listener)
            if not self._is_open:
                pidfds.kill(pidfd)
                return
            self._watch(pidfd)
            self._report_process(records.identify(pid))
        except (PaddockError, OSError) as problem:
            log.warning("envd not started", extra=fields(path=self._path, reason=problem))
            if isinstance(problem, ZygoteBrokenError):
                await self._reject_callers(str(problem))
            else:
                self._failures += 1
            self._watch_listener()
        finally:
            self._settled.set()

    async def _reject_callers(self, why: str) -> None:
        """Reply 503 to all queued connections; a later one is a new attempt."""
        body = msgspec.json.encode({"code": 503, "message": why})
        head = (
            "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        async with asyncio.TaskGroup() as tasks:
            for caller in self._accept_pending():
                tasks.create_task(self._reject(caller, head.encode() + body))

    async def _reject(self, caller: socket.socket, response: bytes) -> None:
        with caller, contextlib.suppress(OSError):
            async with asyncio.timeout(_REJECT_SECONDS):
                await self._loop.sock_sendall(caller, response)
                caller.shutdown(socket.SHUT_WR)
                while await self._loop.sock_recv(caller, 1 << 16):
                    pass

    def _accept_pending(self) -> list[socket.socket]:
        """Accept all queued connections."""
        found: list[socket.socket] = []
        for listener in (self._listener, self._inside.get()):
            try:
                while listener is not None:
                    caller, _ = listener.accept()
                    caller.setblocking(False)
                    found.append(caller)
            except BlockingIOError:  # the queue is empty
                continue
            except OSError:  # no descriptors left: the rest stays queued for the next attempt
                self._failures += 1
        return found

    async def _fork_from_zygote(self, listener: socket.socket) -> tuple[int, int]:
        config, held = self._open_parts(ENVD_PARTS)
        try:
            with self._take_control() as control:
                return await self._zygote.fork(config, {**self._sockets(listener, control), **held})
        finally:
            close_all(list(held.values()))

    def _sockets(self, listener: socket.socket, control: socket.socket) -> dict[str, int]:
        """Return the descriptors of the sockets that an envd serves."""
        sockets = {"listener": listener.fileno(), "control": control.fileno()}
        inside = self._inside.get()
        return sockets if inside is None else {**sockets, "inside": inside.fileno()}

    def _take_control(self) -> socket.socket:
        inner, self._control = self._control or rpc.listen(str(self.control)), None
        return inner

    def _report_process(self, process: records.RecordedProcess | None) -> None:
        """Record the process of envd; a failure is only logged.

        envd must be reachable on a full disk, and readers of an old record check whether the
        process still exists.
        """
        try:
            self._on_change(process)
        except OSError as problem:
            log.warning(
                "process of envd not recorded", extra=fields(path=self._path, reason=problem)
            )

    def _watch(self, pidfd: int) -> None:
        self._pidfd = pidfd
        self._started_at = self._loop.time()
        self._loop.add_reader(pidfd, self._on_envd_exit)

    def _unwatch(self) -> None:
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            self._pidfd = None

    def _on_envd_exit(self) -> None:
        pidfd = self._pidfd
        self._unwatch()
        if pidfd is not None:
            os.close(pidfd)
        # An envd that ran for more than a second did not fail: the next starts without backoff.
        self._failures = 0 if self._loop.time() - self._started_at > 1.0 else self._failures + 1
        if self._is_open:
            self._report_process(None)
            self._watch_listener()


def _take_listener(pidfd: int, pid: int, name: str) -> socket.socket | None:
    """Duplicate the listening socket of a running envd, found by the name it is bound to."""
    inodes: set[str] = set()
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        columns = line.split(maxsplit=7)
        # The kernel shows the path at bind time, before the directory was renamed.
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
