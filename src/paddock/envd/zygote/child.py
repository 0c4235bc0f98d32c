"""The child process of the zygote: joins a sandbox, serves it, and exits.

Its input and its reports are described in `server.py`.
"""

import asyncio
import logging
import os
import socket
import sys
import traceback
from collections.abc import Callable, Mapping

import msgspec
from msgspec import Struct

from paddock.envd import isolation
from paddock.envd.config import Config
from paddock.envd.process.direct_spawner import DirectSpawner
from paddock.envd.process.init_spawner import InitSpawner
from paddock.envd.server import Envd
from paddock.envd.zygote.warmup import warm_pages

log = logging.getLogger(__name__)

MAX_REQUEST = 1 << 20
MAX_FDS = 64
EXIT_LOST = 3
"""The exit status when the sandbox has ended."""
_METERS = ("cgroup", "cgroup_memory", "cgroup_cpu", "disk")
_NAMESPACES = ("userns", "mntns", "netns")


class ZygoteRequest(Struct, frozen=True, kw_only=True):
    """A request of the node."""

    op: str
    id: str = ""
    config: Config = Config()
    fds: tuple[str, ...] = ()


async def attach(
    envd: Envd, config: Config, fds: Mapping[str, int], end: "asyncio.Future[int]"
) -> None:
    """Attach to the init of a sandbox before the final configuration is known."""
    _assign(envd, config, fds, end)
    await envd.attach()


def _assign(envd: Envd, config: Config, fds: Mapping[str, int], end: "asyncio.Future[int]") -> None:
    def on_lost(problem: Exception) -> None:
        log.warning("sandbox has ended", extra={"reason": str(problem)})
        if not end.done():
            end.set_result(EXIT_LOST)

    if "init" in fds:
        spawner = InitSpawner(socket.socket(fileno=fds["init"]), on_lost)
    else:
        spawner = DirectSpawner()
    envd.assign(config, spawner, {k: fds[k] for k in _METERS if k in fds})


async def serve(
    envd: Envd,
    config: Config,
    fds: Mapping[str, int],
    ready: Callable[[], None],
    end: "asyncio.Future[int] | None" = None,
) -> int:
    """Serve one sandbox until idle or until it has ended; return the exit status.

    `end` is the future of an earlier `attach`.
    """
    loop = asyncio.get_running_loop()
    if end is None:
        end = loop.create_future()
        _assign(envd, config, fds, end)
    else:
        envd.reconfigure(config)

    def on_idle(task: asyncio.Task[None]) -> None:
        if end.done():
            return
        if (problem := task.exception()) is not None:
            end.set_exception(problem)
        else:
            end.set_result(0)

    control = socket.socket(fileno=fds["control"]) if "control" in fds else None
    inside = socket.socket(fileno=fds["inside"]) if "inside" in fds else None
    await envd.start(socket.socket(fileno=fds["listener"]), control, inside)
    ready()
    idle = loop.create_task(envd.run_until_idle())
    idle.add_done_callback(on_idle)
    return await end


def run_child(
    envd: Envd,
    config: Config,
    fds: dict[str, int],
    report: int,
    loop: asyncio.AbstractEventLoop | None = None,
) -> int:
    """Join a sandbox, then serve it; report an error if joining fails."""
    # Not `asyncio.run`, which would touch (and so copy) a quarter of a megabyte more, for a
    # cleanup that a process about to exit does not need.
    loop = loop or asyncio.SelectorEventLoop()
    try:
        if "cgroup_procs" in fds:
            os.write(fds["cgroup_procs"], b"0")
        # Without a mount namespace the sandbox is still being created: nothing runs in it yet.
        is_complete = "wait" not in fds or "mntns" in fds
        _join(fds)
        if is_complete and ("init" in fds or "wait" in fds):
            isolation.restrict(isolation.FILE_CAPABILITIES)
        isolation.rename(config.name)
    except OSError as error:
        os.write(report, str(error).encode()[:400])
        return 1

    def ready() -> None:
        os.write(report, b"ok")
        os.close(report)

    if "wait" in fds:
        end: asyncio.Future[int] | None = None
        if is_complete:
            # Do now what does not depend on the final configuration.
            end = loop.create_future()
            loop.run_until_complete(attach(envd, config, fds, end))
            envd.context.write_identity()
        ready()
        config, given = _receive_assignment(fds.pop("wait"))
        fds |= given
        if not is_complete:
            _join(fds)
            isolation.restrict(isolation.FILE_CAPABILITIES)
        return loop.run_until_complete(serve(envd, config, fds, lambda: None, end))
    return loop.run_until_complete(serve(envd, config, fds, ready))


def _join(fds: dict[str, int]) -> None:
    isolation.enter({name: fds[name] for name in _NAMESPACES if name in fds})
    for name in (*_NAMESPACES, "cgroup_procs"):
        if name in fds:
            os.close(fds.pop(name))


def _receive_assignment(fd: int) -> tuple[Config, dict[str, int]]:
    """Wait in the sandbox for the configuration and more descriptors."""
    with socket.socket(fileno=fd) as channel:
        data, fds, _, _ = socket.recv_fds(channel, MAX_REQUEST, MAX_FDS)
    if not data:  # not needed, or the node has ended
        os._exit(0)
    request = msgspec.json.decode(data, type=ZygoteRequest)
    return request.config, dict(zip(request.fds, fds, strict=True))


def child_main(
    envd: Envd,
    config: Config,
    fds: dict[str, int],
    report: int,
    loop: asyncio.AbstractEventLoop | None = None,
) -> None:
    """Run a child in a process just forked, and exit."""
    status = 1
    try:
        os.umask(0o022)
        if loop is None:  # otherwise a spare has done this
            _keep_only({*fds.values(), report})
        status = run_child(envd, config, fds, report, loop)
    except BaseException:  # noqa: BLE001 - the root of a process; it ends here
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


def spare_main(envd: Envd, channel: socket.socket) -> None:
    """Wait in a forked process for a sandbox to serve; exit with the zygote."""
    try:
        os.umask(0o022)
        _keep_only({channel.fileno()})
        loop = asyncio.SelectorEventLoop()
        warm_pages(envd, loop)
        data, fds, _, _ = socket.recv_fds(channel, MAX_REQUEST, MAX_FDS)
        channel.close()
        if not data:
            os._exit(0)
        request = msgspec.json.decode(data, type=ZygoteRequest)
        report, *given = fds
        child_main(envd, request.config, dict(zip(request.fds, given, strict=True)), report, loop)
    except BaseException:  # noqa: BLE001 - the root of a process; it ends here
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(1)


def _keep_only(wanted: set[int]) -> None:
    """Close all descriptors except the standard streams and these."""
    last = 2
    for fd in sorted(wanted):
        os.closerange(last + 1, fd)
        last = max(last, fd)
    os.closerange(last + 1, 1 << 20)
