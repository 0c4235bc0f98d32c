"""Warming up the zygote: an envd serves requests in it, so that children find all code loaded.

Real requests are served in a scratch directory: modules, caches and lazily created objects come
into being once, in memory that all children share. Then one child is profiled while it starts and
answers a request, and the code that it used is moved together (`cow_layout.py`), because every
child will copy those pages.
"""

import array
import asyncio
import contextlib
import logging
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Collection
from types import CodeType, FrameType
from typing import TypeVar

from paddock.envd import blocking
from paddock.envd.config import Config
from paddock.envd.process import init_protocol
from paddock.envd.process.direct_spawner import DirectSpawner
from paddock.envd.process.init_spawner import InitSpawner
from paddock.envd.server import Envd
from paddock.envd.zygote import cow_layout, warmup_requests

log = logging.getLogger(__name__)

_OUTPUTS = 2 | 4
"""Standard output and error in init's descriptor mask."""
_TIMEOUT_SECONDS = 20.0
_ROUNDS = 4
_REHEARSALS = 16
"""Enough for the interpreter to specialize the moved code."""

T = TypeVar("T")
ChildMain = Callable[[Config, dict[str, int], int], int]
"""Runs a child with config, descriptors, and the pipe of its report."""


def warm_up(run_child: ChildMain) -> None:
    """Serve a few requests in this process; leave no thread, descriptor or file behind.

    Several rounds, because the interpreter specializes code as it runs. What every child does
    first is done last here, so that the interpreter's caches hold it.
    """
    directory = tempfile.mkdtemp(prefix="envd-warm-")
    try:
        for _ in range(_ROUNDS):
            _serve_warmup(directory)
        blocking.stop_threads()
        try:
            cow_layout.gather(_profile_child(f"{directory}/socket", run_child))
            _warm_claim(f"{directory}/claimed")
        except OSError as problem:
            log.warning("warm-up failed: envds need more memory", extra={"error": str(problem)})
        for _ in range(_REHEARSALS):
            _warm_start()
    finally:
        blocking.stop_threads()
        shutil.rmtree(directory, ignore_errors=True)


def load(place: str) -> None:
    """Serve a few requests in this process, so that all code is loaded.

    For an envd that enters a root from which nothing can be loaded, and that forks no others.
    `place` is a writable directory, as the root may be read-only.
    """
    directory = tempfile.mkdtemp(prefix="envd-warm-", dir=place)
    try:
        _serve_warmup(directory)
    finally:
        blocking.stop_threads()
        shutil.rmtree(directory, ignore_errors=True)


def _serve_warmup(directory: str) -> None:
    asyncio.run(_run_warmup(directory))
    os.unlink(f"{directory}/socket")


def warm_pages(envd: Envd, loop: asyncio.AbstractEventLoop) -> None:
    """Serve a request in an idle child, so that it copies the pages that serving touches.

    Copying them takes most of the time of a first request. Call it before joining a sandbox.
    """
    directory = f"{tempfile.gettempdir()}/envd-warm-{os.urandom(8).hex()}"
    os.mkdir(directory, 0o700)
    try:
        loop.run_until_complete(
            _serve_requests(envd, _config(directory), directory, ("socket", warmup_requests.HEALTH))
        )
    finally:
        for name in ("socket", "control", ".E2B_SANDBOX"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{directory}/{name}")
        os.rmdir(directory)


def _warm_claim(home: str) -> None:
    """Warm up a claim. Its code is moved apart: children in the warm stock do not copy it."""
    os.mkdir(home)
    claimed, _ = _profile(lambda: _serve_claim(home))
    begun, _ = _profile(_warm_start)
    cow_layout.gather(claimed.keys() - begun.keys())
    for _ in range(_REHEARSALS):
        _serve_claim(home)


def _serve_claim(home: str) -> None:
    """Serve the requests of a child that starts, is claimed and runs a first command."""
    config = Config(
        passwd_path=_write_passwd(home),
        group_path=f"{home}/passwd",
        identity_dir=home,
        tasks_dir=f"{home}/tasks",
        is_reserved=True,
    )
    calls = (
        ("socket", warmup_requests.HEALTH),
        ("control", warmup_requests.INIT),
        ("socket", warmup_requests.COMMAND),
    )
    loop = asyncio.SelectorEventLoop()
    loop.run_until_complete(_serve_requests(Envd(), config, home, *calls))
    loop.close()
    for name in ("socket", "control"):
        os.unlink(f"{home}/{name}")


async def _serve_requests(
    envd: Envd, config: Config, directory: str, *calls: tuple[str, bytes]
) -> None:
    """Serve requests, each at the listener named with it, with a fake init."""
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with (
        ours,
        _listen(f"{directory}/socket") as listener,
        _listen(f"{directory}/control") as control,
    ):
        loop.add_reader(ours, _fake_init, ours)
        envd.assign(config, InitSpawner(theirs))
        await envd.start(listener.dup(), control.dup())
        idle = loop.create_task(envd.run_until_idle())
        try:
            async with asyncio.timeout(_TIMEOUT_SECONDS):
                for name, request in calls:
                    await _send_request(f"{directory}/{name}", request)
        finally:
            loop.remove_reader(ours)
            idle.cancel()
            envd.close()
            await asyncio.sleep(0)


async def _send_request(path: str, request: bytes) -> None:
    """Send a request without asyncio's client, which children do not use."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    received: list[bytes] = []
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(_TIMEOUT_SECONDS)
        client.connect(path)
        client.send(request)

        def read() -> None:
            received.append(client.recv(65536))
            if not received[-1] and not ended.done():
                ended.set_result(None)

        loop.add_reader(client, read)
        try:
            await ended
        finally:
            loop.remove_reader(client)
    if not received[0].startswith(b"HTTP/1.1 20"):
        raise OSError(f"a warm-up request failed: {received[0][:200]!r}")


def _fake_init(channel: socket.socket) -> None:
    """Answer like the init of a sandbox whose commands end at once."""
    request = init_protocol.decode(channel.recv(65536), [])
    if request.op != init_protocol.SPAWN:
        channel.send(_init_reply(request))
        return
    ident = int.from_bytes(request.body[:4], "little")
    reading, writing = os.pipe()
    os.write(writing, b"warm\n")
    ends = [reading, os.dup(reading)]
    begun = init_protocol.encode_record(ident, 2, init_protocol.RecordFlags(0), _OUTPUTS)
    (reply,) = init_protocol.encode(request.op | init_protocol.REPLY, request.seq, begun)
    channel.sendmsg([reply], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", ends))])
    for fd in (writing, *ends):
        os.close(fd)
    ended = init_protocol.encode_record(ident, 2, init_protocol.RecordFlags.EXITED)
    channel.send(init_protocol.encode(init_protocol.EXIT, 0, ended)[0])


def _warm_start() -> None:
    loop = asyncio.SelectorEventLoop()
    warm_pages(Envd(), loop)
    loop.close()


def _profile(work: Callable[[], T]) -> tuple[dict[int, CodeType], T]:
    """Return the code objects that `work` uses, by id, and its result.

    Keep them: the address of a freed code object may be reused.
    """
    used: dict[int, CodeType] = {}

    def note(frame: FrameType, event: str, argument: object) -> None:
        used[id(frame.f_code)] = frame.f_code

    sys.setprofile(note)
    try:
        return used, work()
    finally:
        sys.setprofile(None)


def _profile_child(path: str, run_child: ChildMain) -> Collection[int]:
    """Fork a child that starts and serves one request; return the ids of the code that it used.

    Ids are addresses, which are the same in this process.
    """
    init, channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    reading, report = os.pipe()
    with _listen(path) as listener, init, channel, open(reading, "rb") as reader:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                fds = {"listener": os.dup(listener.fileno()), "init": os.dup(channel.fileno())}
                config = _config(f"{path}.d", idle=0.05)
                used, status = _profile(lambda: run_child(config, fds, os.dup(report)))
                _write_all(report, array.array("Q", used).tobytes())
            finally:
                os._exit(status)
        os.close(report)
        channel.close()  # so that its exit ends the wait
        try:
            _drive_child(path, init)
            # A serving child reports `ok`.
            received = reader.read()
        finally:
            os.waitpid(child, 0)
    found = array.array("Q")
    if received[:2] != b"ok" or (len(received) - 2) % found.itemsize:
        raise OSError(f"the profiled child failed: {received[:200]!r}")
    found.frombytes(received[2:])
    return frozenset(found)


def _drive_child(path: str, init: socket.socket) -> None:
    init.settimeout(_TIMEOUT_SECONDS)
    request = init.recv(64)
    if not request:
        return  # it has exited; its report has the cause
    init.send(_init_reply(init_protocol.decode(request, [])))
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(_TIMEOUT_SECONDS)
        client.connect(path)
        client.send(warmup_requests.HEALTH)
        while client.recv(4096):
            pass


def _init_reply(request: init_protocol.InitMessage) -> bytes:
    """Return the reply of an init without processes."""
    (reply,) = init_protocol.encode(request.op | init_protocol.REPLY, request.seq, request.body)
    return reply


def _config(directory: str, *, idle: float = 60.0) -> Config:
    return Config(identity_dir=directory, tasks_dir=f"{directory}/tasks", idle_exit_seconds=idle)


def _listen(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(8)
    return listener


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _write_passwd(directory: str) -> str:
    path = f"{directory}/passwd"
    with open(path, "w") as file:
        file.write(f"user:x:{os.geteuid()}:{os.getegid()}::{directory}:/bin/sh\n")
    return path


async def _run_warmup(directory: str) -> None:
    passwd = _write_passwd(directory)
    config = Config(passwd_path=passwd, group_path=passwd, identity_dir=None, sandbox_id="warm")
    envd = Envd(config, DirectSpawner(switch_user=False))
    # Through a descriptor, because a socket path is limited to 107 bytes.
    place = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    path = f"/proc/self/fd/{place}/socket"
    try:
        await envd.start(_listen(path))
        async with asyncio.timeout(_TIMEOUT_SECONDS):
            for request in warmup_requests.all_routes(directory):
                await _post_once(path, request)
    finally:
        os.close(place)
        envd.close()
        await asyncio.sleep(0)


async def _post_once(path: str, request: bytes) -> None:
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        writer.write(request)
        response = await reader.read()
        if not response.startswith(b"HTTP/1.1 "):
            raise RuntimeError("envd did not answer a warm-up request")
    finally:
        writer.close()
        await writer.wait_closed()
