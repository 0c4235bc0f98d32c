"""`Envd`, the daemon of one sandbox: wiring, routes, authorization, CORS, idle time.

Serves two listeners with the same routes: the public one requires the token and has no `/init`; the
control listener, which only the node can reach, requires nothing. A third one, for code inside the
sandbox, serves `GET /envs` alone. Protocols are in `rpc/`, `files/` and `tasks/`.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Mapping

import msgspec

from paddock.envd.config import VERSION, Config
from paddock.envd.files.copy_routes import CopyRoutes
from paddock.envd.files.routes import FileRoutes
from paddock.envd.files.signature import is_token
from paddock.envd.files.watch import Watchers
from paddock.envd.http.request import BodyTooLargeError, HttpRequest
from paddock.envd.http.server import HttpListener
from paddock.envd.memory_kills import from_usage_files
from paddock.envd.metrics import Meter
from paddock.envd.process.direct_spawner import DirectSpawner
from paddock.envd.process.registry import ProcessRegistry
from paddock.envd.process.spawner import Spawner
from paddock.envd.rpc import connect
from paddock.envd.rpc.connect import Method
from paddock.envd.rpc.connect_frames import Code, ConnectError
from paddock.envd.rpc.filesystem_service import FilesystemService
from paddock.envd.rpc.process_service import ProcessService
from paddock.envd.sandbox_context import InitRequest, SandboxContext
from paddock.envd.tasks.files import TaskFiles
from paddock.envd.tasks.http_api import TaskRoutes, is_task_path
from paddock.envd.tasks.manager import TaskManager
from paddock.envd.tasks.registry_launcher import RegistryLauncher

log = logging.getLogger(__name__)

_JSON = [("Content-Type", "application/json")]
_CORS = ("Access-Control-Allow-Origin", "*")
_EXPOSED = (
    "Access-Control-Expose-Headers",
    (
        "Location, Cache-Control, X-Content-Type-Options, Content-Encoding, Content-Disposition, "
        "Content-Range, Connect-Content-Encoding, Connect-Accept-Encoding"
    ),
)
_PREFLIGHT = [
    ("Access-Control-Allow-Methods", "HEAD, GET, POST, PUT, PATCH, DELETE"),
    ("Access-Control-Allow-Headers", "*"),
    ("Access-Control-Max-Age", "7200"),
]
_INSIDE_CONNECTIONS = 32
"""Connections of code inside the sandbox at a time."""
_INSIDE_GRACE_SECONDS = 5.0
"""A request of code inside may delay the exit of an idle envd by this."""
_TASKS_HOST = "5758-"
"""Host names of the task executor's port start with this; its health response differs."""
Route = Callable[[HttpRequest], Awaitable[None]]


def respond_json(request: HttpRequest, status: int, value: object) -> None:
    """Send a JSON response."""
    request.respond(status, msgspec.json.encode(value), headers=_JSON)


def respond_problem(request: HttpRequest, status: int, message: str) -> None:
    """Send an error response of the plain HTTP routes."""
    respond_json(request, status, {"code": status, "message": message})


class Envd:
    """Serves one sandbox."""

    def __init__(
        self,
        config: Config | None = None,
        spawner: Spawner | None = None,
        usage_files: Mapping[str, int] | None = None,
    ) -> None:
        """Create an envd; `assign` may set the sandbox later."""
        config, spawner = config or Config(), spawner or DirectSpawner()
        self.config = config
        self.context = SandboxContext(config)
        self.registry = ProcessRegistry(
            spawner, from_usage_files(usage_files, config.memory_total_bytes)
        )
        self.watchers = Watchers()
        self._usage_files = usage_files
        self._meter = Meter(config, usage_files)
        self._is_attached = False
        self._files = FileRoutes(self.context)
        self._copies = CopyRoutes(self.context)
        self._launcher = RegistryLauncher(self.registry, self.context)
        self._task_files = TaskFiles(config.tasks_dir)
        self.tasks = TaskManager(self._launcher, self._task_files)
        self._task_routes = TaskRoutes(self.tasks)
        self._methods: dict[str, Method] = {
            **ProcessService(self.registry, self.context).methods(),
            **FilesystemService(self.context, self.watchers).methods(),
        }
        self._public = HttpListener(lambda request: self._serve(request, is_internal=False))
        self._control = HttpListener(lambda request: self._serve(request, is_internal=True))
        self._inside = HttpListener(self._serve_inside, max_connections=_INSIDE_CONNECTIONS)
        self._plain: Mapping[tuple[str, str], Route] = {
            ("GET", "/metrics"): self._get_metrics,
            ("GET", "/envs"): self._get_envs,
            ("POST", "/files/compose"): self._files.compose,
            ("POST", "/files/copy"): self._copies.serve,
        }
        self._internal: Mapping[tuple[str, str], Route] = {
            ("POST", "/init"): self._post_init,
            ("GET", "/status"): self._get_status,
        }

    def assign(
        self, config: Config, spawner: Spawner, usage_files: Mapping[str, int] | None = None
    ) -> None:
        """Serve this sandbox; must be called before `start`."""
        if config.tasks_dir != self.config.tasks_dir:
            self._task_files.use_directory(config.tasks_dir)
        self.registry.assign(spawner)
        self._usage_files = usage_files
        self._is_attached = False
        self.reconfigure(config)

    def reconfigure(self, config: Config) -> None:
        """Replace the configuration for the same sandbox; its tasks stay."""
        self.config = config
        self.context.assign(config)
        self._meter = Meter(config, self._usage_files)
        self.registry.memory_kills = from_usage_files(self._usage_files, config.memory_total_bytes)

    async def attach(self) -> int:
        """Find surviving processes and tasks; return the number of processes."""
        inherited = await self.registry.attach()
        # At once, so that no output of tasks that an earlier envd started is missed.
        await self.tasks.start()
        self._is_attached = True
        return inherited

    async def start(
        self,
        listener: socket.socket,
        control: socket.socket | None = None,
        inside: socket.socket | None = None,
    ) -> None:
        """Attach, unless already attached, then serve the listeners."""
        inherited = 0 if self._is_attached else await self.attach()
        self.context.write_identity()
        self.context.write_outbound()
        await self._public.start(listener)
        if control is not None:
            await self._control.start(control)
        if inside is not None:
            await self._inside.start(inside)
        log.debug(
            "envd is serving", extra={"sandbox": self.config.sandbox_id, "inherited": inherited}
        )

    async def run_until_idle(self) -> None:
        """Return after `idle_exit_seconds` of idle time; never return if that is `None`."""
        limit = self.config.idle_exit_seconds
        if limit is None:
            await asyncio.get_running_loop().create_future()
            return
        pause = max(limit, 0.05)
        while True:
            await asyncio.sleep(pause)
            pause = max(limit - self.idle_seconds(), limit / 8, 0.05)
            if self.idle_seconds() >= limit and self._close_idle_connections():
                return

    async def serve_trusted(self, request: HttpRequest) -> None:
        """Serve one request of an authenticated control plane, from any listener."""
        await self._serve(request, is_internal=True)

    def idle_seconds(self) -> float:
        """Return the seconds without requests, processes, watchers and tasks."""
        servers = (self._public, self._control)
        if any(d.in_flight for d in servers) or any(self.registry.running()) or self.watchers.count:
            return 0.0
        if self.tasks.active:
            return 0.0
        if self.config.is_reserved and not self.context.sandbox_id:
            return 0.0
        now = asyncio.get_running_loop().time()
        # Not the requests of code inside, which would keep its envd in memory at will: neither
        # many of them, nor one that never ends.
        return now - max(d.last_active for d in servers)

    def close(self) -> None:
        """Stop serving; processes keep running."""
        self._public.close()
        self._control.close()
        self._inside.close()
        self.watchers.close()
        self.tasks.close()
        self._launcher.close()
        self.registry.close()

    def _close_idle_connections(self) -> bool:
        servers = (self._public, self._control)
        if not all(c.close_if_idle() for d in servers for c in tuple(d.connections)):
            return False
        busy = [c for c in tuple(self._inside.connections) if not c.close_if_idle()]
        limit = self.config.idle_exit_seconds or 0.0
        if busy and self.idle_seconds() < limit + _INSIDE_GRACE_SECONDS:
            return False
        for connection in busy:
            connection.abort()
        return True

    # -- routing

    async def _serve(self, request: HttpRequest, *, is_internal: bool) -> None:
        if "origin" in request.headers:
            request.response_headers += [_CORS, _EXPOSED]
        if request.method == "OPTIONS":
            request.respond(204, headers=_PREFLIGHT)
            return
        path = request.path
        if path == "/health":
            self._respond_health(request)
            return
        if path == "/files":
            await self._files.serve(request, is_trusted=is_internal)
            return
        method = self._methods.get(path)
        if not is_internal and not self._has_token(request):
            self._refuse(request, is_rpc=method is not None)
            return
        if method is not None:
            await connect.serve(request, method)
        elif is_task_path(path):
            await self._task_routes.serve(request)
        else:
            await self._serve_plain(request, is_internal=is_internal)

    async def _serve_inside(self, request: HttpRequest) -> None:
        """Serve code inside the sandbox, which gets its variables with the token."""
        if request.path == "/health":
            self._respond_health(request)
        elif not self._has_token(request):
            self._refuse(request, is_rpc=False)
        elif request.path != "/envs":
            respond_problem(request, 404, f"there is no {request.path} inside the sandbox")
        elif request.method != "GET":
            respond_problem(request, 405, f"{request.method} is not allowed here")
        else:
            await self._get_envs(request)

    async def _serve_plain(self, request: HttpRequest, *, is_internal: bool) -> None:
        path = request.path
        route = self._plain.get((request.method, path))
        if route is None and is_internal:
            route = self._internal.get((request.method, path))
        if route is None:
            self._not_found(request, is_internal=is_internal)
        else:
            await route(request)

    @staticmethod
    def _respond_health(request: HttpRequest) -> None:
        if request.headers.get("host", "").startswith(_TASKS_HOST):
            respond_json(request, 200, {"status": "healthy"})
        else:
            request.respond(204, headers=[("Cache-Control", "no-store")])

    def _has_token(self, request: HttpRequest) -> bool:
        token = self.context.settings.access_token
        return token is None or is_token(request.headers.get("x-access-token"), token)

    def _refuse(self, request: HttpRequest, *, is_rpc: bool) -> None:
        message = "unauthorized access: give the sandbox's token in the X-Access-Token header"
        if is_rpc:
            connect.respond_error(request, ConnectError(Code.UNAUTHENTICATED, message))
        else:
            respond_problem(request, 401, message)

    def _not_found(self, request: HttpRequest, *, is_internal: bool) -> None:
        known = {path for _, path in self._plain} | (
            {path for _, path in self._internal} if is_internal else set[str]()
        )
        if request.path in known:
            respond_problem(request, 405, f"{request.method} is not allowed here")
        else:
            respond_problem(request, 404, f"there is no {request.path} here")

    # -- plain routes

    async def _get_metrics(self, request: HttpRequest) -> None:
        respond_json(request, 200, self._meter.read())

    async def _get_envs(self, request: HttpRequest) -> None:
        respond_json(request, 200, self.context.defaults())

    async def _post_init(self, request: HttpRequest) -> None:
        try:
            body = await request.body.read(1 << 20)
            wanted = msgspec.json.decode(body or b"{}", type=InitRequest)
        except (msgspec.MsgspecError, BodyTooLargeError, RecursionError) as error:
            respond_problem(request, 400, f"cannot read the settings: {error}")
            return
        self.context.apply(wanted)
        request.respond(204)

    async def _get_status(self, request: HttpRequest) -> None:
        """Report to the node what this envd is doing."""
        respond_json(
            request,
            200,
            {
                "version": VERSION,
                "pid": os.getpid(),
                "sandbox_id": self.context.sandbox_id,
                "processes": sum(1 for _ in self.registry.running()),
                "watchers": self.watchers.count,
                "idle_seconds": self._idle_before_request(),
            },
        )

    def _idle_before_request(self) -> float:
        """Return the idle seconds, not counting this request."""
        others = self._public.in_flight + self._control.in_flight > 1
        if others or any(self.registry.running()) or self.watchers.count:
            return 0.0
        now = asyncio.get_running_loop().time()
        return now - self._public.last_active
