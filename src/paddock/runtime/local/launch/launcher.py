"""The node's side of the launcher process: clone skeletons, mount roots, start inits.

The launcher is started when needed and replaced when it exits; skeletons outlive it. The program is
`native/launcher/launcher.c`.
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

from paddock.kit.errors import UnavailableError
from paddock.runtime.local.launch import native_build
from paddock.runtime.local.launch.protocol import (
    READY,
    Launch,
    LauncherReply,
    MakeRoot,
    Prepare,
    Start,
    decode_reply,
)
from paddock.runtime.local.launch.skeleton import Skeleton
from paddock.wire import seqpacket

_TIMEOUT_SECONDS = 30.0
"""For one step of a launch."""


class LauncherError(UnavailableError):
    """A sandbox could not be launched; the message includes the kernel's error."""


class SandboxLauncher:
    """Starts the launcher process and sends requests to it."""

    def __init__(self, stage: str, cache: Path) -> None:
        """`cache` is the directory of built programs."""
        self._stage = stage
        self._cache = cache
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._pending: collections.deque[asyncio.Future[tuple[LauncherReply, list[int]]]] = (
            collections.deque()
        )

    @property
    def pid(self) -> int | None:
        """The pid of the launcher, or `None` if it does not run."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start the launcher unless it runs."""
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
        self,
        slot: int,
        *,
        base: int,
        cgroup: str | None,
        joins: Sequence[str],
        devices: str = "",
    ) -> Skeleton:
        """Clone a skeleton; `ready` waits until it has set up its namespaces."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        skeleton: Skeleton | None = None
        try:
            with theirs:
                request = Prepare(base=base, devices=devices, cgroup=cgroup, joins=tuple(joins))
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
        """Wait until a skeleton is ready, or raise the reason of its failure."""
        if skeleton.is_ready:
            return
        async with asyncio.timeout(_TIMEOUT_SECONDS):
            data, _ = await receive(skeleton.control)
        if not data:
            raise LauncherError("cannot launch the sandbox: its first process died early")
        if data != READY:
            raise LauncherError(f"cannot create the sandbox's namespaces: {_text(data)}")
        skeleton.is_ready = True

    async def mount_root(self, userns: int | None, request: MakeRoot) -> list[int]:
        """Mount a root for a user namespace, or for one created later.

        Return the descriptors of the root's mount and of one mount per bind.
        """
        _, fds = await self._call(request, [] if userns is None else [userns])
        return fds

    async def launch(
        self, skeleton: Skeleton, launch: Launch, root: MakeRoot | None = None
    ) -> None:
        """Turn a skeleton into init; return once init is confined and serves.

        The launcher mounts the root and passes it on; without `root` the skeleton mounts its own.
        """
        if root is None:
            with contextlib.suppress(BrokenPipeError):  # it has failed; `ready` raises the reason
                seqpacket.send(skeleton.control, launch.encode())
        else:
            await self._start(skeleton, Start(root=root, launch=launch))
        await self.ready(skeleton)
        async with asyncio.timeout(_TIMEOUT_SECONDS):
            data, _ = await receive(skeleton.control)
        if data:
            raise LauncherError(f"cannot start the sandbox: {_text(data)}")
        try:
            # The socket is also closed when init dies: check that it is alive.
            signal.pidfd_send_signal(skeleton.pidfd, 0)
        except ProcessLookupError as problem:
            raise LauncherError("cannot start the sandbox: its init died") from problem
        skeleton.close()

    async def _start(self, skeleton: Skeleton, request: Start) -> None:
        try:
            await self._call(request, [skeleton.userns, skeleton.control.fileno()])
        except LauncherError:
            await self.ready(skeleton)  # raises the reason if the skeleton failed
            raise

    def stop(self) -> None:
        """Kill the launcher; sandboxes keep running."""
        if self._control is not None:
            self._discard()
        if self._process is not None:
            self._process.wait()
            self._process = None

    async def _call(
        self, request: Prepare | MakeRoot | Start, fds: Sequence[int]
    ) -> tuple[LauncherReply, list[int]]:
        self.start()
        if self._control is None:
            raise LauncherError("the launcher does not run")
        future: asyncio.Future[tuple[LauncherReply, list[int]]] = (
            asyncio.get_running_loop().create_future()
        )
        try:
            seqpacket.send(self._control, request.encode(), fds)
        except BlockingIOError as problem:
            raise LauncherError(
                "too many sandboxes are being started at once", retry_after_seconds=0.5
            ) from problem
        except OSError as problem:
            self._discard()
            raise LauncherError(f"the launcher has exited: {problem.strerror}") from problem
        self._pending.append(future)
        async with asyncio.timeout(_TIMEOUT_SECONDS):
            reply, got = await future
        if reply.errno:
            seqpacket.close_all(got)
            raise LauncherError(f"cannot launch the sandbox: {reply.error}")
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
            self._discard()
            return
        future = self._pending.popleft()
        if future.done():  # the caller was cancelled
            self._discard_reply(decode_reply(data), fds)
        else:
            future.set_result((decode_reply(data), fds))

    def _discard_reply(self, reply: LauncherReply, fds: list[int]) -> None:
        if reply.pid:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fds[0], signal.SIGKILL)
        seqpacket.close_all(fds)

    def _discard(self) -> None:
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control.fileno())
            self._control.close()
            self._control = None
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
        if self._process is not None:
            self._process.wait()
            self._process = None
        waiting, self._pending = self._pending, collections.deque()
        for future in waiting:
            if not future.done():
                future.set_exception(
                    LauncherError("the launcher died while it worked", retry_after_seconds=0.1)
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
