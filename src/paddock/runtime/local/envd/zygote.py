"""The node's side of the zygote, the process that envds are forked from.

The zygote (`paddock.envd.zygote.server`) has loaded envd's code, so a fork takes milliseconds. The
node starts it when needed and replaces it when it exits. `envd_listener.py` decides when to fork.
"""

import array
import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping

import msgspec
from msgspec import Struct

from paddock.kit.errors import UnavailableError
from paddock.runtime.local.kernel.pidfds import kill
from paddock.runtime.local.node import records
from paddock.wire import seqpacket
from paddock.wire.seqpacket import close_all

_TIMEOUT_SECONDS = 20.0


class ZygoteBrokenError(UnavailableError):
    """The zygote cannot start; a retry would fail, too."""


class _ZygoteReply(Struct, frozen=True, kw_only=True):
    id: str = ""
    op: str
    error: str = ""
    pid: int = 0
    status: int = 0


_decoder = msgspec.json.Decoder(_ZygoteReply)


class WaitingEnvd(Struct):
    """An envd that has joined a sandbox and waits for its config."""

    process: records.RecordedProcess
    pidfd: int
    channel: socket.socket
    """envd exits when this is closed."""
    missing: tuple[str, ...] = ()
    """Parts it has not joined because they did not exist yet."""

    def close(self) -> None:
        """Kill it, unless its pidfd was taken over."""
        if self.pidfd >= 0:
            kill(self.pidfd)
            self.pidfd = -1
        self.channel.close()


class ZygoteProcess:
    """The zygote process of a node."""

    def __init__(self, *, spares: int = 0) -> None:
        self._spares = spares
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._pending: dict[str, asyncio.Future[tuple[_ZygoteReply, list[int]]]] = {}
        self._count = 0
        self._exit_reason = ""
        """The error that the zygote reported before it exited, if any."""
        self._has_replied = False
        """Whether this zygote has replied to a request: then the installation works."""

    @property
    def pid(self) -> int | None:
        """The pid of the zygote, or `None` if it does not run."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start the zygote unless it runs."""
        if self._control is not None:
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.ExitStack() as on_failure, theirs:
            on_failure.callback(ours.close)
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "paddock.envd.zygote.start",
                    "--fd",
                    str(theirs.fileno()),
                    "--spares",
                    str(self._spares),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                # It may be killed while it starts: the next node removes its files from there.
                env=os.environ | {"TMPDIR": tempfile.gettempdir()},
            )
            on_failure.pop_all()
        ours.setblocking(False)
        self._control = ours
        self._exit_reason, self._has_replied = "", False
        asyncio.get_running_loop().add_reader(ours.fileno(), self._readable)

    async def fork(self, config: Mapping[str, object], fds: Mapping[str, int]) -> tuple[int, int]:
        """Fork an envd with these descriptors, by name; return its pid and a pidfd."""
        self.start()
        if self._control is None:
            raise UnavailableError("the zygote of envd does not run")
        self._count += 1
        ident = str(self._count)
        request = {"op": "start", "id": ident, "config": config, "fds": list(fds)}
        future: asyncio.Future[tuple[_ZygoteReply, list[int]]] = (
            asyncio.get_running_loop().create_future()
        )
        self._pending[ident] = future
        try:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds.values()))]
            self._control.sendmsg([msgspec.json.encode(request)], rights, socket.MSG_NOSIGNAL)
            async with asyncio.timeout(_TIMEOUT_SECONDS):
                reply, got = await future
        except OSError as problem:
            # Removed first, so that `_discard` does not fail this future, too.
            self._pending.pop(ident, None)
            if not isinstance(problem, (BlockingIOError, TimeoutError)):
                self._discard()
            _kill_undelivered(future)
            raise UnavailableError(f"cannot start envd: {problem}") from problem
        except asyncio.CancelledError:
            _kill_undelivered(future)
            raise
        finally:
            self._pending.pop(ident, None)
        if reply.op != "started" or len(got) != 1:
            _kill_unclaimed(reply, got)
            raise UnavailableError(f"cannot start envd: {reply.error or reply.op}")
        return reply.pid, got[0]

    async def fork_waiting(
        self, fds: Mapping[str, int], missing: tuple[str, ...] = ()
    ) -> WaitingEnvd | None:
        """Fork an envd that joins a sandbox by these descriptors and waits for its config."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        try:
            with theirs:
                pid, pidfd = await self.fork({}, {"wait": theirs.fileno(), **fds})
        except BaseException:
            ours.close()
            raise
        if (process := records.identify(pid)) is None:
            os.close(pidfd)
            ours.close()
            return None
        return WaitingEnvd(process, pidfd, ours, missing)

    def stop(self) -> None:
        """Kill the zygote; envds keep running."""
        self._discard()

    def _readable(self) -> None:
        if self._control is None:
            return
        try:
            data, fds = seqpacket.receive(self._control)
        except BlockingIOError:
            return
        except OSError:  # it exited with unread requests
            data, fds = self._read_after_error()
        if not data:
            self._discard()
            return
        reply = _decoder.decode(data)
        if reply.op == "broken":
            self._exit_reason = reply.error
            self._discard()
            return
        self._has_replied = True
        future = self._pending.get(reply.id)
        if reply.op == "exited" or future is None or future.done():
            _kill_unclaimed(reply, fds)  # exits are watched by pidfd
            return
        future.set_result((reply, fds))

    def _read_after_error(self) -> tuple[bytes, list[int]]:
        """Read the zygote's last message, which the kernel delivers after the error."""
        try:
            return seqpacket.receive(self._control) if self._control else (b"", [])
        except OSError:
            return b"", []

    def _discard(self) -> None:
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
        for future in self._pending.values():
            if not future.done():
                future.set_exception(self._lost_error(status))

    def _lost_error(self, status: int) -> UnavailableError:
        """A zygote that exited by itself before its first reply would do so again."""
        why = self._exit_reason or (f"it exited with status {status}" if status > 0 else "")
        if self._has_replied or not why:
            because = f": {why}" if why else ""
            return UnavailableError(f"the zygote of envd exited{because}", retry_after_seconds=0.1)
        return ZygoteBrokenError(
            f"the zygote of envd does not start: {why}",
            hint="read the node's log and repair the installation",
        )


def _kill_undelivered(future: asyncio.Future[tuple[_ZygoteReply, list[int]]]) -> None:
    """Kill an envd whose reply arrived just when its caller gave up."""
    if future.done() and not future.cancelled() and future.exception() is None:
        _kill_unclaimed(*future.result())


def _kill_unclaimed(reply: _ZygoteReply, fds: list[int]) -> None:
    """Kill an envd that no caller waits for, and close its descriptors."""
    if fds and reply.op == "started":
        kill(fds[0], close=False)
    elif (
        reply.op == "started" and reply.pid > 0
    ):  # its pidfd could not be received: no descriptors left
        with contextlib.suppress(ProcessLookupError):
            os.kill(reply.pid, signal.SIGKILL)
    close_all(fds)
