"""envd as a pod's sidecar: `python -m paddock.runtime.kubernetes.sidecar`.

Orders come in the environment (`PADDOCK_SIDECAR`, JSON). It waits for the main container, enters
it, serves clients on one port and Paddock on another, runs the start command, and says on
`/ready` when the ready command agrees. What it was told later (token, environment) is kept in
memory of the pod, so that a restarted sidecar is the same. It ends with the main container: when
that is started anew, from another image, so is the sidecar, which has lost the right to enter.
"""

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

import msgspec

from paddock.envd import isolation
from paddock.envd.config import Config, EnvdSettings
from paddock.envd.http.request import HttpRequest
from paddock.envd.http.server import HttpServer
from paddock.envd.process.direct_spawner import DirectSpawner
from paddock.envd.server import Envd, respond_json, respond_problem
from paddock.envd.zygote import warmup
from paddock.kit import bearer, clock
from paddock.resources import tokens
from paddock.runtime.kubernetes import names
from paddock.runtime.kubernetes.pods.render import SidecarOrders
from paddock.runtime.kubernetes.sidecar import container_entry
from paddock.runtime.kubernetes.sidecar.accounting import own_cgroups
from paddock.runtime.kubernetes.sidecar.container_entry import MainContainer
from paddock.runtime.kubernetes.sidecar.sidecar_state import Memory
from paddock.runtime.kubernetes.sidecar.start_log import Follower, Lines

log = logging.getLogger(__name__)

_READY_PAUSE_SECONDS = 0.2
_COMMAND_SECONDS = 30.0


class Sidecar:
    """One sandbox's envd, its door for orders, and its start and ready commands."""

    def __init__(
        self,
        orders: SidecarOrders,
        config: Config,
        memory: Memory,
        main: MainContainer,
        cgroups: Mapping[str, int],
    ) -> None:
        self._orders = orders
        self._memory = memory
        self._main = main
        self._envd = Envd(config, DirectSpawner(), cgroups)
        self._control = HttpServer(self._serve)
        self._lines = Lines(clock.system())
        self._follower: Follower | None = None
        self._is_ready = False

    async def run(self, listener: socket.socket, control: socket.socket) -> None:
        """Serve until the process is told to end."""
        await self._control.start(control)
        await self._envd.start(listener)
        ending = asyncio.get_running_loop().create_task(container_entry.until_over(self._main))
        ending.add_done_callback(_end_with_main)
        is_first = self._memory.main != self._main.life
        self._remember()
        if self._orders.start_command and is_first:
            process = self._begin(self._orders.start_command, output=subprocess.PIPE)
            self._follower = Follower(process, self._lines)
        if self._orders.ready_command:
            while await self._status_of(self._orders.ready_command) != 0:  # noqa: ASYNC110
                await asyncio.sleep(_READY_PAUSE_SECONDS)
        self._is_ready = True
        log.info("sandbox is ready")
        await asyncio.get_running_loop().create_future()

    async def _serve(self, request: HttpRequest) -> None:
        if request.path == "/ready":
            # For the kubelet, which has no token; it learns nothing else.
            if self._is_ready:
                request.respond(204, headers=[(names.MAIN_HEADER, self._main.life)])
            else:
                respond_problem(request, 503, "its ready command has not succeeded yet")
            return
        token = bearer.token_of(request.headers.get("authorization", ""))
        if token is None or not tokens.matches(token, self._orders.control_hash):
            respond_problem(request, 401, "this door is for Paddock's control plane")
            return
        if request.path == "/logs":
            self._show_lines(request)
            return
        before = self._envd.environment.settings
        await self._envd.serve_trusted(request)
        if self._envd.environment.settings != before:
            self._remember()

    def _show_lines(self, request: HttpRequest) -> None:
        asked = request.query
        try:
            since = datetime.fromisoformat(asked["since"]) if asked.get("since") else None
            limit = int(asked.get("limit", "1000"))
        except ValueError as error:
            respond_problem(request, 400, f"since is a time and limit a number: {error}")
            return
        respond_json(request, 200, self._lines.read(since=since, limit=limit))

    def _remember(self) -> None:
        self._memory.write(self._main.life, self._envd.environment.settings)

    def _begin(self, command: str, *, output: int | None = None) -> subprocess.Popen[bytes]:
        user = self._envd.environment.user(self._orders.user)
        is_root = os.geteuid() == 0
        return subprocess.Popen(
            ["/bin/bash", "-l", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**self._envd.environment.variables(user), **self._orders.env},
            cwd=self._orders.workdir or user.home,
            start_new_session=True,
            user=user.uid if is_root else None,
            group=user.gid if is_root else None,
            extra_groups=list(user.groups) if is_root else None,
        )

    async def _status_of(self, command: str) -> int:
        process = self._begin(command)
        deadline = asyncio.get_running_loop().time() + _COMMAND_SECONDS
        pause = 0.01
        while (status := process.poll()) is None:
            if asyncio.get_running_loop().time() > deadline:
                os.killpg(process.pid, signal.SIGKILL)
            await asyncio.sleep(pause)
            pause = min(pause * 2, 0.2)
        return status


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen(1024)
    return listener


def _end_with_main(_ending: asyncio.Task[None]) -> None:
    log.info("the main container ended")
    os._exit(0)


def main() -> int:
    """Find the main container, enter it, serve."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    orders = msgspec.json.decode(os.environ[names.CONFIG], type=SidecarOrders)
    tools = Path(os.environ.get("PADDOCK_TOOLS_DIR", names.TOOLS_DIRECTORY))
    state = Path(os.environ.get("PADDOCK_STATE_DIR", names.STATE_DIRECTORY))
    memory = Memory(state)
    listener = _listen(orders.host, orders.port)
    control = _listen(orders.host, orders.control_port)
    isolation.preload()
    warmup.load(str(state))
    container = container_entry.wait_for_main(orders.uid)
    container_entry.write_users(container.pid, orders.user, orders.user_id, tools)
    config = Config(
        settings=memory.settings
        or EnvdSettings(
            env_vars=orders.env, default_user=orders.user, default_workdir=orders.workdir
        ),
        passwd_path=f"{names.TOOLS_DIRECTORY}/passwd",
        group_path=f"{names.TOOLS_DIRECTORY}/group",
        identity_dir=None,
        cpu_count=orders.cpu_count,
        memory_total_bytes=orders.memory_bytes,
        disk_total_bytes=orders.disk_bytes,
    )
    cgroups = own_cgroups()
    os.umask(0o022)
    container_entry.enter(container.pid)
    sidecar = Sidecar(orders, config, memory, container, cgroups)
    loop = asyncio.new_event_loop()
    # A sidecar is the first process of its container: without a handler TERM would be ignored.
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, os._exit, 0)
    loop.run_until_complete(sidecar.run(listener, control))
    return 0


if __name__ == "__main__":
    sys.exit(main())
