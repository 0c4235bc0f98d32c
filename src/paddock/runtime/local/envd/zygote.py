"""The parent of envds, as the node holds it: started when needed, asked to fork, lost and replaced.

It is a warm process (`paddock.envd.zygote.server`), so that an envd is there in milliseconds. Which
sandbox an envd serves, and for how long, is the business of `envds`.
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

_PATIENCE = 20.0


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

    process: records.Process
    pidfd: int
    channel: socket.socket
    """It ends with this."""
    lacks: tuple[str, ...] = ()
    """What it has not joined, as that was still being made."""

    def close(self) -> None:
        """Let it end, unless it has work."""
        if self.pidfd >= 0:
            kill(self.pidfd)
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
        self._has_answered = False
        """Whether this one has answered anybody: then nothing is wrong with the installation."""

    @property
    def pid(self) -> int | None:
        """Which process it is, while there is one."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start it if it is not there."""
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
                # Killed while it warms up, it leaves files: where the next node finds them.
                env=os.environ | {"TMPDIR": tempfile.gettempdir()},
            )
            on_failure.pop_all()
        ours.setblocking(False)
        self._control = ours
        self._last_word, self._has_answered = "", False
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
            _dismiss_unheard(future)
            raise UnavailableError(f"no envd could be started: {problem}") from problem
        except asyncio.CancelledError:
            _dismiss_unheard(future)
            raise
        finally:
            self._waiting.pop(ident, None)
        if reply.op != "started" or len(got) != 1:
            _dismiss(reply, got)
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
        if (process := records.identify(pid)) is None:
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
            data, fds = seqpacket.receive(self._control)
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
        self._has_answered = True
        future = self._waiting.get(reply.id)
        if reply.op == "exited" or future is None or future.done():
            _dismiss(reply, fds)  # ends are seen through pidfds
            return
        future.set_result((reply, fds))

    def _hear_out(self) -> tuple[bytes, list[int]]:
        """Read what it said itself, which the kernel gives after the error."""
        try:
            return seqpacket.receive(self._control) if self._control else (b"", [])
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
        """One that ended by itself before it ever answered would do so again; others would not."""
        why = self._last_word or (f"it ended with status {status}" if status > 0 else "")
        if self._has_answered or not why:
            because = f": {why}" if why else ""
            return UnavailableError(f"the parent of envds died{because}", retry_after_seconds=0.1)
        return BrokenError(
            f"the parent of envds does not start: {why}",
            hint="the node's log has more; mend the installation",
        )


def _dismiss_unheard(future: asyncio.Future[tuple[_Reply, list[int]]]) -> None:
    """Let go of an answer that came in the very moment in which its waiter gave up."""
    if future.done() and not future.cancelled() and future.exception() is None:
        _dismiss(*future.result())


def _dismiss(reply: _Reply, fds: list[int]) -> None:
    """An envd that nobody waits for any more must not serve."""
    if fds and reply.op == "started":
        kill(fds[0], close=False)
    elif reply.op == "started" and reply.pid > 0:  # we had no room for its descriptor
        with contextlib.suppress(ProcessLookupError):
            os.kill(reply.pid, signal.SIGKILL)
    close_all(fds)
