"""`paddock task-executor`: the task API for pods, where no envd serves the sandbox.

Host mode runs tasks where the executor runs. Sidecar mode enters the namespaces of the main
container; the pod must share its process namespace. Container mode creates a container for each
task through a CRI socket. The requirements of a mode are checked at startup.
"""

import asyncio
import contextlib
import hmac
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from paddock.envd import logs
from paddock.envd.http.request import HttpRequest
from paddock.envd.http.server import HttpListener
from paddock.envd.tasks.files import TaskFiles
from paddock.envd.tasks.http_api import TaskRoutes, is_task_path, respond_problem
from paddock.envd.tasks.manager import TaskManager
from paddock.envd.tasks.shim import ShimLauncher, on_host
from paddock.envd.tasks.task_launcher import ExecutorError, TaskLauncher

log = logging.getLogger(__name__)

MAIN_CONTAINER_VARIABLE = "SANDBOX_MAIN_CONTAINER"
"""The variable that identifies the processes of the main container."""
MODES = ("host", "sidecar", "container")


class ExecutorOptions(Struct, frozen=True, kw_only=True):
    """The options of an executor."""

    mode: str = "host"
    data_dir: str = "/var/lib/sandbox/tasks"
    listen: str = "127.0.0.1:5758"
    token: str = ""
    main_container: str = "main"
    cri_socket: str = ""
    pod_uid: str = ""


def check(options: ExecutorOptions) -> None:
    """Raise `ExecutorError` for options that could only fail later."""
    if options.mode not in MODES:
        raise ExecutorError(f"unknown mode {options.mode!r}: use one of {', '.join(MODES)}")
    host, _, port = options.listen.rpartition(":")
    if not port.isdigit():
        raise ExecutorError(f"invalid listen address {options.listen!r}: use host:port")
    if not options.token and host not in ("127.0.0.1", "localhost", "[::1]", "::1"):
        raise ExecutorError(
            "without a token every client of this address could run commands: "
            "set TASK_EXECUTOR_TOKEN, or listen on 127.0.0.1"
        )
    if options.mode == "container" and not options.cri_socket:
        raise ExecutorError("container mode needs a CRI socket: set --cri-socket or CRI_SOCKET")
    if options.mode == "container" and not Path(options.cri_socket).exists():
        raise ExecutorError(f"there is no CRI socket at {options.cri_socket}")
    if options.mode == "sidecar" and os.geteuid() != 0:
        raise ExecutorError("sidecar mode needs root to enter namespaces: run it as root")


class Executor:
    """Serves tasks over TCP."""

    def __init__(self, options: ExecutorOptions, launcher: TaskLauncher) -> None:
        self._options = options
        self.tasks = TaskManager(launcher, TaskFiles(options.data_dir))
        self._routes = TaskRoutes(self.tasks)
        self._server = HttpListener(self._serve)

    async def start(self, listener: socket.socket) -> None:
        """Resume the tasks of an earlier executor, then serve."""
        found = await self.tasks.start()
        await self._server.start(listener)
        log.info(
            "task executor is serving",
            extra={"listen": self._options.listen, "mode": self._options.mode, "tasks": found},
        )

    def close(self) -> None:
        """Stop serving; tasks keep running."""
        self._server.close()
        self.tasks.close()

    async def _serve(self, request: HttpRequest) -> None:
        if request.path == "/health":
            request.respond(
                200, b'{"status":"healthy"}', headers=[("Content-Type", "application/json")]
            )
        elif not self._is_authorized(request):
            respond_problem(
                request, 401, "unauthorized: send the token in the X-Access-Token header"
            )
        elif is_task_path(request.path):
            await self._routes.serve(request)
        else:
            respond_problem(request, 404, f"there is no {request.path} here")

    def _is_authorized(self, request: HttpRequest) -> bool:
        token = self._options.token
        given = request.headers.get("x-access-token", "")
        if not given and request.headers.get("authorization", "").startswith("Bearer "):
            given = request.headers["authorization"].removeprefix("Bearer ")
        return not token or hmac.compare_digest(given.encode(), token.encode())


# ---- sidecar mode ----------------------------------------------------------------------------


def main_process(name: str) -> int:
    """Return the pid of the main container's first process, found by its environment."""
    wanted = f"{MAIN_CONTAINER_VARIABLE}={name}".encode()
    for entry in sorted(os.listdir("/proc"), key=lambda text: (len(text), text)):
        if entry.isdigit() and int(entry) != os.getpid() and wanted in _environ(int(entry)):
            return int(entry)
    raise OSError(
        f"no process has {MAIN_CONTAINER_VARIABLE}={name}: "
        "set shareProcessNamespace in the pod, and the variable in its main container"
    )


def _environ(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def enter_main(name: str, argv: tuple[str, ...], directory: str | None) -> tuple[str, ...]:
    """Return a command prefixed by `nsenter`, so that it runs in the main container."""
    pid = main_process(name)
    where = (f"--wd={directory}",) if directory else ()
    flags = ("--mount", "--uts", "--ipc", "--net", "--pid", "--root")
    return ("nsenter", "--target", str(pid), *flags, *where, "--", *argv)


def main_environment(name: str) -> Mapping[str, str]:
    """Return the environment of the main container."""
    pairs = (item.partition(b"=") for item in _environ(main_process(name)) if b"=" in item)
    return {os.fsdecode(key): os.fsdecode(value) for key, _, value in pairs}


# ---- running ---------------------------------------------------------------------------------


def launcher_for(options: ExecutorOptions) -> TaskLauncher:
    """Return the launcher of a mode."""
    if options.mode == "container":
        try:
            from paddock.envd.tasks.cri import ContainerLauncher
        except ImportError as error:
            raise ExecutorError("container mode needs grpcio: install paddock[cri]") from error
        return ContainerLauncher.connect(options.cri_socket, options.pod_uid)
    if options.mode == "sidecar":
        name = options.main_container
        return ShimLauncher(
            lambda argv, directory: enter_main(name, argv, directory),
            lambda: main_environment(name),
        )
    return ShimLauncher(on_host)


async def serve(options: ExecutorOptions) -> None:
    """Run an executor until SIGTERM or SIGINT."""
    check(options)
    launcher = launcher_for(options)
    if (probe := getattr(launcher, "probe", None)) is not None:
        await probe()
    host, _, port = options.listen.rpartition(":")
    listener = socket.create_server((host.strip("[]"), int(port)), backlog=128)
    listener.setblocking(False)
    executor = Executor(options, launcher)
    await executor.start(listener)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()
    executor.close()
    if (close := getattr(launcher, "close", None)) is not None:
        with contextlib.suppress(OSError):
            close()


def run(options: ExecutorOptions) -> None:
    """Run an executor in this process; exit with 2 if it cannot start."""
    logs.configure("%(levelname)s %(name)s: %(message)s")
    try:
        asyncio.run(serve(options))
    except (ExecutorError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
