"""One short life of an envd inside the zygote, so that every child finds it all loaded and used.

Serves real requests in a scratch directory: modules, caches and lazily made objects come into being
here, once, in memory that all children share. Then a child is watched while it starts and answers:
the code it used is moved together (`locality`), because that is what every child will copy.
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
from paddock.envd.zygote import cow_layout

log = logging.getLogger(__name__)

_START_PATH, _CONNECT = "/process.Process/Start", "application/connect+json"
_START = b'{"process":{"cmd":"/bin/true"},"stdin":true}'
_SHELL_COMMAND = b'{"process":{"cmd":"/bin/bash","args":["-l","-c","true"]},"stdin":false}'
_OUTPUTS = 2 | 4
"""Standard output and error, as init's masks name them."""
_INIT = b'{"envVars":{"A":"b"},"accessToken":"warm","defaultUser":"user","sandboxId":"warm"}'
_HEALTH = b"GET /health HTTP/1.1\r\nHost: s\r\nConnection: close\r\n\r\n"
_TIMEOUT_SECONDS = 20.0
_ROUNDS = 4
_REHEARSALS = 16
"""Enough for the interpreter to have learned what it can about moved code."""

T = TypeVar("T")
ChildMain = Callable[[Config, dict[str, int], int], int]
"""A child's whole life, given config, descriptors and where it reports that it serves."""


def warm_up(run_child: ChildMain) -> None:
    """Serve a few requests to ourselves, then leave no thread, descriptor or file behind.

    Several times: the interpreter rewrites code while it learns, and had better do so here. What
    every child does comes last: it is what the interpreter's caches should know.
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
            log.warning("envds will take more memory and time than they need: %s", problem)
        for _ in range(_REHEARSALS):
            _rehearse_start()
    finally:
        blocking.stop_threads()
        shutil.rmtree(directory, ignore_errors=True)


def load(place: str) -> None:
    """Serve a few requests to ourselves, so that all that serving takes is loaded.

    For an envd that enters a root where nothing could be loaded from, and that forks no others;
    `place` is where it may write, as its own root may be read-only.
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


def rehearse(envd: Envd, loop: asyncio.AbstractEventLoop) -> None:
    """Answer a request to ourselves in a child that has time: what serving touches is its own then.

    Copying those pages takes most of the time to a first answer. Call it before joining a sandbox.
    """
    directory = f"{tempfile.gettempdir()}/envd-warm-{os.urandom(8).hex()}"
    os.mkdir(directory, 0o700)
    try:
        loop.run_until_complete(
            _serve_requests(envd, _config(directory), directory, ("socket", _HEALTH))
        )
    finally:
        for name in ("socket", "control", ".E2B_SANDBOX"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{directory}/{name}")
        os.rmdir(directory)


def _warm_claim(home: str) -> None:
    """Rehearse that, its code apart from what every child uses: in stock it is not copied."""
    os.mkdir(home)
    claimed, _ = _profile(lambda: _serve_claim(home))
    begun, _ = _profile(_rehearse_start)
    cow_layout.gather(claimed.keys() - begun.keys())
    for _ in range(_REHEARSALS):
        _serve_claim(home)


def _serve_claim(home: str) -> None:
    """Answer as a child does that has started, is claimed and gets a first command."""
    config = Config(
        passwd_path=_write_passwd(home),
        group_path=f"{home}/passwd",
        identity_dir=home,
        tasks_dir=f"{home}/tasks",
        is_reserved=True,
    )
    calls = (
        ("socket", _HEALTH),
        ("control", _post("/init", "application/json", _INIT)),
        ("socket", _post(_START_PATH, _CONNECT, _framed(_SHELL_COMMAND), "X-Access-Token: warm")),
    )
    loop = asyncio.SelectorEventLoop()
    loop.run_until_complete(_serve_requests(Envd(), config, home, *calls))
    loop.close()
    for name in ("socket", "control"):
        os.unlink(f"{home}/{name}")


async def _serve_requests(
    envd: Envd, config: Config, directory: str, *calls: tuple[str, bytes]
) -> None:
    """Serve requests, each at the door named with it, as in a sandbox whose init we play."""
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, _listen(f"{directory}/socket") as door, _listen(f"{directory}/control") as control:
        loop.add_reader(ours, _fake_init, ours)
        envd.assign(config, InitSpawner(theirs))
        await envd.start(door.dup(), control.dup())
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
    """Ask without `asyncio`'s own client, which a child has no use for."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    said: list[bytes] = []
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(_TIMEOUT_SECONDS)
        client.connect(path)
        client.send(request)

        def read() -> None:
            said.append(client.recv(65536))
            if not said[-1] and not ended.done():
                ended.set_result(None)

        loop.add_reader(client, read)
        try:
            await ended
        finally:
            loop.remove_reader(client)
    if not said[0].startswith(b"HTTP/1.1 20"):
        raise OSError(f"a rehearsal went wrong: {said[0][:200]!r}")


def _fake_init(channel: socket.socket) -> None:
    """Answer like the init of a sandbox in which nothing runs for long."""
    asked = init_protocol.decode(channel.recv(65536), [])
    if asked.op != init_protocol.SPAWN:
        channel.send(_init_reply(asked))
        return
    ident = int.from_bytes(asked.body[:4], "little")
    reading, writing = os.pipe()
    os.write(writing, b"warm\n")
    ends = [reading, os.dup(reading)]
    begun = init_protocol.encode_record(ident, 2, init_protocol.RecordFlags(0), _OUTPUTS)
    (reply,) = init_protocol.encode(asked.op | init_protocol.REPLY, asked.seq, begun)
    channel.sendmsg([reply], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", ends))])
    for fd in (writing, *ends):
        os.close(fd)
    ended = init_protocol.encode_record(ident, 2, init_protocol.RecordFlags.EXITED)
    channel.send(init_protocol.encode(init_protocol.EXIT, 0, ended)[0])


def _rehearse_start() -> None:
    loop = asyncio.SelectorEventLoop()
    rehearse(Envd(), loop)
    loop.close()


def _profile(work: Callable[[], T]) -> tuple[dict[int, CodeType], T]:
    """Give the code that this uses, by id, and what it gives.

    Hold it: a code object that is freed would give its address to another.
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
    """Fork a child that starts as all do and answers one request; gives the ids of code it used.

    Ids are addresses, and the child's are our own.
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
        channel.close()  # so that its death ends our waiting
        try:
            _drive_child(path, init)
            # `ok` is what it reports when it serves.
            said = reader.read()
        finally:
            os.waitpid(child, 0)
    found = array.array("Q")
    if said[:2] != b"ok" or (len(said) - 2) % found.itemsize:
        raise OSError(f"the child that was watched did not get far: {said[:200]!r}")
    found.frombytes(said[2:])
    return frozenset(found)


def _drive_child(path: str, init: socket.socket) -> None:
    init.settimeout(_TIMEOUT_SECONDS)
    asked = init.recv(64)
    if not asked:
        return  # it ended; what it said tells why
    init.send(_init_reply(init_protocol.decode(asked, [])))
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(_TIMEOUT_SECONDS)
        client.connect(path)
        client.send(_HEALTH)
        while client.recv(4096):
            pass


def _init_reply(asked: init_protocol.InitMessage) -> bytes:
    """Answer like the init of a sandbox in which nothing runs."""
    (reply,) = init_protocol.encode(asked.op | init_protocol.REPLY, asked.seq, asked.body)
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
    # By way of a descriptor, as a socket's path may be no longer than 107 bytes.
    place = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    path = f"/proc/self/fd/{place}/socket"
    try:
        await envd.start(_listen(path))
        async with asyncio.timeout(_TIMEOUT_SECONDS):
            for request in _requests(directory):
                await _post_once(path, request)
    finally:
        os.close(place)
        envd.close()
        await asyncio.sleep(0)


def _post(path: str, kind: str, body: bytes, *more: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", f"Content-Type: {kind}", f"Content-Length: {len(body)}"]
    return "\r\n".join((*lines, "Connection: close", *more, "", "")).encode() + body


def _framed(message: bytes) -> bytes:
    return b"\0" + len(message).to_bytes(4, "big") + message


def _requests(directory: str) -> list[bytes]:
    def get(path: str, *more: str) -> bytes:
        lines = [f"GET {path} HTTP/1.1", "Connection: close", *more]
        return "\r\n".join(lines).encode() + b"\r\n\r\n"

    path = b'{"path":"%b"}' % directory.encode()
    form = b'--x\r\nContent-Disposition: form-data; name="file"; filename="b"\r\n\r\n1\r\n--x--\r\n'
    filesystem = "/filesystem.Filesystem/"
    return [
        get("/health", "Origin: here"),
        get("/metrics"),
        get("/envs"),
        _post(_START_PATH, _CONNECT, _framed(_START)),
        _post("/process.Process/List", "application/json", b"{}"),
        _post("/process.Process/List", "application/proto", b""),
        _post("/files?path=a", "application/octet-stream", b"x" * 2_000_000),
        _post("/files", "multipart/form-data; boundary=x", form),
        get("/files?path=a"),
        get("/files?path=a", "Accept-Encoding: gzip"),
        get("/files?path=a", "Range: bytes=1-2"),
        get("/files?path=missing"),
        _post(filesystem + "Stat", "application/json", path),
        _post(filesystem + "ListDir", "application/json", path),
        _post(filesystem + "CreateWatcher", "application/json", path),
        _post(filesystem + "Remove", "application/json", b'{"path":"a"}'),
        _post(filesystem + "Stat", "application/json", b'{"path":"a"}'),
    ]


async def _post_once(path: str, request: bytes) -> None:
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        writer.write(request)
        answer = await reader.read()
        if not answer.startswith(b"HTTP/1.1 "):
            raise RuntimeError("envd did not answer its own warm-up request")
    finally:
        writer.close()
        await writer.wait_closed()
