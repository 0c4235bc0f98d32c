"""The node's side of launching: the launcher process, and skeletons from clone to init.

The launcher is started when first needed and again whenever it is gone. Skeletons are their own
processes: what was cloned survives the launcher.
"""

import asyncio
import collections
import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from paddock.kit.errors import UnavailableError
from paddock.runtime.local.launch import native_build
from paddock.runtime.local.launch.protocol import MakeRoot, Prepare, Reply, Start, decode_reply
from paddock.runtime.local.launch.skeleton import READY, Launch
from paddock.wire import seqpacket

_PATIENCE = 30.0
"""Seconds for one step; a machine that needs longer is in trouble that others must see."""


class LaunchError(UnavailableError):
    """A sandbox could not be made; the message has the kernel's own words."""


class Skeleton(Struct):
    """A clone that waits to become a sandbox."""

    pid: int
    pidfd: int
    control: socket.socket
    slot: int
    userns: int
    is_ready: bool = False
    """It said so. Before that it may already be told what to become."""

    def kill(self) -> None:
        """End it, whatever it is by now."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        self.release()

    def release(self) -> None:
        """Let go of it altogether."""
        self.close()
        os.close(self.pidfd)

    def close(self) -> None:
        """Let go of what only a skeleton needs; the pidfd stays."""
        self.control.close()
        if self.userns >= 0:
            os.close(self.userns)
            self.userns = -1


class Launching:
    """Talks to the launcher, which it keeps alive."""

    def __init__(self, stage: str, cache: Path) -> None:
        """`cache` is where the launcher's program is, or is built."""
        self._stage = stage
        self._cache = cache
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._waiting: collections.deque[asyncio.Future[tuple[Reply, list[int]]]] = (
            collections.deque()
        )

    @property
    def pid(self) -> int | None:
        """Which process the launcher is, while there is one."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start the launcher if it is not there."""
        if self._control is not None:
            return
        program = native_build.ensure_launcher(self._cache)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [program, str(theirs.fileno()), self._stage],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        ours.setblocking(False)
        self._control = ours
        asyncio.get_running_loop().add_reader(ours.fileno(), self._readable)

    async def prepare(
        self, slot: int, *, base: int, cgroup: str | None, joins: Sequence[str]
    ) -> Skeleton:
        """Clone a skeleton; `ready` waits until it is done with what needs no root."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        skeleton: Skeleton | None = None
        try:
            with theirs:
                request = Prepare(base=base, cgroup=cgroup, joins=tuple(joins))
                reply, fds = await self._call(request, [theirs.fileno()])
            skeleton = Skeleton(reply.pid, fds[0], ours, slot, -1)
            skeleton.userns = os.open(f"/proc/{skeleton.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        except BaseException:
            if skeleton is not None:
                skeleton.kill()
            else:
                ours.close()
            raise
        return skeleton

    async def ready(self, skeleton: Skeleton) -> None:
        """Wait until a skeleton is ready, or say why it never will be."""
        if skeleton.is_ready:
            return
        async with asyncio.timeout(_PATIENCE):
            data, _ = await receive(skeleton.control)
        if not data:
            raise LaunchError("the sandbox's first process died before it was ready")
        if data != READY:
            raise LaunchError(f"the sandbox's namespaces could not be made: {_text(data)}")
        skeleton.is_ready = True

    async def mount_root(self, userns: int | None, request: MakeRoot) -> list[int]:
        """Mount a root for a user namespace (or one to come): its mount, then one per bind."""
        _, fds = await self._call(request, [] if userns is None else [userns])
        return fds

    async def launch(
        self, skeleton: Skeleton, launch: Launch, root: MakeRoot | None = None
    ) -> None:
        """Let a skeleton become init; returns once that is confined and serves.

        The launcher mounts its root and hands it over; without one the skeleton mounts its own.
        """
        if root is None:
            with contextlib.suppress(BrokenPipeError):  # it has failed already, and says why
                seqpacket.send(skeleton.control, launch.encode())
        else:
            await self._start(skeleton, Start(root=root, launch=launch))
        await self.ready(skeleton)
        async with asyncio.timeout(_PATIENCE):
            data, _ = await receive(skeleton.control)
        if data:
            raise LaunchError(f"the sandbox could not start: {_text(data)}")
        try:
            # The socket also ends when init dies: it must be there still.
            signal.pidfd_send_signal(skeleton.pidfd, 0)
        except ProcessLookupError as problem:
            raise LaunchError("the sandbox's init died while it started") from problem
        skeleton.close()

    async def _start(self, skeleton: Skeleton, request: Start) -> None:
        try:
            await self._call(request, [skeleton.userns, skeleton.control.fileno()])
        except LaunchError:
            await self.ready(skeleton)  # if that is what has failed, it says why
            raise

    def stop(self) -> None:
        """End the launcher; sandboxes do not notice."""
        if self._control is not None:
            self._lose()
        if self._process is not None:
            self._process.wait()
            self._process = None

    async def _call(
        self, request: Prepare | MakeRoot | Start, fds: Sequence[int]
    ) -> tuple[Reply, list[int]]:
        self.start()
        if self._control is None:
            raise LaunchError("the launcher does not run")
        future: asyncio.Future[tuple[Reply, list[int]]] = asyncio.get_running_loop().create_future()
        try:
            seqpacket.send(self._control, request.encode(), fds)
        except BlockingIOError as problem:
            raise LaunchError(
                "too many sandboxes are being started at once", retry_after_seconds=0.5
            ) from problem
        except OSError as problem:
            self._lose()
            raise LaunchError(f"the launcher is gone: {problem.strerror}") from problem
        self._waiting.append(future)
        async with asyncio.timeout(_PATIENCE):
            reply, got = await future
        if reply.errno:
            seqpacket.close_all(got)
            raise LaunchError(f"the sandbox could not be made: {reply.error}")
        return reply, got

    def _readable(self) -> None:
        if self._control is None:
            return
        try:
            data, fds = seqpacket.receive(self._control)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        if not data:
            self._lose()
            return
        future = self._waiting.popleft()
        if future.done():  # whoever asked has given up
            self._drop(decode_reply(data), fds)
        else:
            future.set_result((decode_reply(data), fds))

    def _drop(self, reply: Reply, fds: list[int]) -> None:
        if reply.pid:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fds[0], signal.SIGKILL)
        seqpacket.close_all(fds)

    def _lose(self) -> None:
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control.fileno())
            self._control.close()
            self._control = None
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
        if self._process is not None:
            self._process.wait()
            self._process = None
        waiting, self._waiting = self._waiting, collections.deque()
        for future in waiting:
            if not future.done():
                future.set_exception(
                    LaunchError("the launcher died while it worked", retry_after_seconds=0.1)
                )


async def receive(channel: socket.socket) -> tuple[bytes, list[int]]:
    """Wait for one message on a non-blocking socket."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            return seqpacket.receive(channel)
        except BlockingIOError:
            pass
        except ConnectionResetError:
            return b"", []
        readable = loop.create_future()
        loop.add_reader(channel.fileno(), _wake, readable)
        try:
            await readable
        finally:
            loop.remove_reader(channel.fileno())


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


def _wake(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
