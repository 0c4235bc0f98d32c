"""envd as a pod's sidecar: `python -m paddock.runtime.kubernetes.sidecar`.

The configuration is in the environment (`PADDOCK_SIDECAR`, JSON). The sidecar waits for the main
container, enters it, serves clients on one port and the control plane on another, runs the start
command, and reports on `/ready` whether the ready command has succeeded. Later settings (token,
environment) are kept in an in-memory volume of the pod and survive a restart of the sidecar. The
sidecar exits with the main container: it has dropped the capabilities to enter another one, so it
is restarted with it.
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

from paddock.envd import isolation, outbound
from paddock.envd.config import Config, EnvdSettings
from paddock.envd.http.request import HttpRequest
from paddock.envd.http.server import HttpListener
from paddock.envd.process.direct_spawner import DirectSpawner
from paddock.envd.process.shells import BASH
from paddock.envd.rpc.connect_frames import ConnectError
from paddock.envd.server import Envd, respond_json, respond_problem
from paddock.envd.zygote import warmup
from paddock.kit import bearer, clock
from paddock.resources import tokens
from paddock.runtime.kubernetes import names
from paddock.runtime.kubernetes.pods.render import SidecarConfig
from paddock.runtime.kubernetes.sidecar import container_entry
from paddock.runtime.kubernetes.sidecar.accounting import own_cgroups
from paddock.runtime.kubernetes.sidecar.container_entry import MainContainer
from paddock.runtime.kubernetes.sidecar.sidecar_state import SidecarState
from paddock.runtime.kubernetes.sidecar.start_log import LogBuffer, OutputReader

log = logging.getLogger(__name__)

_READY_PAUSE_SECONDS = 0.2
_COMMAND_SECONDS = 30.0


class Sidecar:
    """The envd of one sandbox, its control port, and its start and ready commands."""

    def __init__(
        self,
        config: SidecarConfig,
        envd_config: Config,
        state: SidecarState,
        main: MainContainer,
        cgroups: Mapping[str, int],
    ) -> None:
        self._config = config
        self._state = state
        self._main = main
        self._envd = Envd(envd_config, DirectSpawner(), cgroups)
        self._control = HttpListener(self._serve)
        self._log_buffer = LogBuffer(clock.system())
        self._output_reader: OutputReader | None = None
        self._is_ready = False
        self._problem: str | None = None
        """Why the sandbox can never become ready."""

    async def run(self, listener: socket.socket, control: socket.socket) -> None:
        """Serve until the process ends."""
        await self._control.start(control)
        await self._envd.start(listener)
        ending = asyncio.get_running_loop().create_task(container_entry.wait_exit(self._main))
        ending.add_done_callback(_exit_with_main)
        is_first = self._state.main != self._main.instance_id
        self._save_state()
        if self._lacks_shell():
            await asyncio.get_running_loop().create_future()
        if self._config.start_command and is_first:
            process = self._spawn(self._config.start_command, output=subprocess.PIPE)
            self._output_reader = OutputReader(process, self._log_buffer)
        if self._config.ready_command:
            while await self._exit_code(self._config.ready_command) != 0:  # noqa: ASYNC110
                await asyncio.sleep(_READY_PAUSE_SECONDS)
        self._is_ready = True
        log.info("sandbox is ready")
        await asyncio.get_running_loop().create_future()

    def _lacks_shell(self) -> bool:
        """Whether the template has commands and the image no shell to run them."""
        if not (self._config.start_command or self._config.ready_command):
            return False
        try:
            self._envd.context.program(BASH)
        except ConnectError as error:
            self._problem = f"the template's start or ready command cannot run: {error}"
            log.warning("sandbox cannot become ready: its image has no shell")
            return True
        return False

    async def _serve(self, request: HttpRequest) -> None:
        if request.path == "/ready":
            # For the kubelet's probe, which has no token.
            if self._problem is not None:
                respond_problem(request, names.STATUS_NEVER_READY, self._problem)
            elif self._is_ready:
                request.respond(204, headers=[(names.MAIN_HEADER, self._main.instance_id)])
            else:
                respond_problem(request, 503, "the ready command has not succeeded yet")
            return
        token = bearer.token_of(request.headers.get("authorization", ""))
        if token is None or not tokens.matches(token, self._config.control_hash):
            respond_problem(request, 401, "this port is for Paddock's control plane")
            return
        if request.path == "/logs":
            self._serve_logs(request)
            return
        before = self._envd.context.settings
        await self._envd.serve_trusted(request)
        if self._envd.context.settings != before:
            self._save_state()

    def _serve_logs(self, request: HttpRequest) -> None:
        query = request.query
        try:
            since = datetime.fromisoformat(query["since"]) if query.get("since") else None
            limit = int(query.get("limit", "1000"))
        except ValueError as error:
            respond_problem(request, 400, f"since must be a time and limit a number: {error}")
            return
        respond_json(request, 200, self._log_buffer.read(since=since, limit=limit))

    def _save_state(self) -> None:
        self._state.write(self._main.instance_id, self._envd.context.settings)

    def _spawn(self, command: str, *, output: int | None = None) -> subprocess.Popen[bytes]:
        user = self._envd.context.user(self._config.user)
        is_root = os.geteuid() == 0
        argv, env = self._envd.context.invocation(
            (BASH, "-l", "-c", command),
            {**self._envd.context.variables(user), **self._config.env},
        )
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=env,
            cwd=self._envd.context.directory("", user),
            start_new_session=True,
            user=user.uid if is_root else None,
            group=user.gid if is_root else None,
            extra_groups=list(user.groups) if is_root else None,
        )

    async def _exit_code(self, command: str) -> int:
        process = self._spawn(command)
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


def _exit_with_main(_ending: asyncio.Task[None]) -> None:
    log.info("main container ended, exiting")
    os._exit(0)


def main() -> int:
    """Find the main container, enter it, serve."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    config = msgspec.json.decode(os.environ[names.CONFIG], type=SidecarConfig)
    tools_dir = Path(os.environ.get("PADDOCK_TOOLS_DIR", names.TOOLS_DIRECTORY))
    state_dir = Path(os.environ.get("PADDOCK_STATE_DIR", names.STATE_DIRECTORY))
    state = SidecarState(state_dir)
    listener = _listen(config.host, config.port)
    control = _listen(config.host, config.control_port)
    isolation.preload()
    outbound.preload()
    warmup.load(str(state_dir))
    container = container_entry.wait_for_main(config.uid)
    envd_config = Config(
        settings=state.settings
        or EnvdSettings(
            env_vars=config.env, default_user=config.user, default_workdir=config.workdir
        ),
        passwd_path=f"{names.TOOLS_DIRECTORY}/passwd",
        group_path=f"{names.TOOLS_DIRECTORY}/group",
        identity_dir=None,
        owns_root=True,
        cpu_count=config.cpu_count,
        memory_total_bytes=config.memory_bytes,
        disk_total_bytes=config.disk_bytes,
    )
    cgroups = own_cgroups()
    os.umask(0o022)
    tools = os.open(tools_dir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    container_entry.enter(container.pid)
    container_entry.write_users(config.user, config.user_id, tools)
    os.close(tools)
    sidecar = Sidecar(config, envd_config, state, container, cgroups)
    loop = asyncio.new_event_loop()
    # The sidecar is PID 1 of its container: without a handler SIGTERM would be ignored.
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, os._exit, 0)
    loop.run_until_complete(sidecar.run(listener, control))
    return 0


if __name__ == "__main__":
    sys.exit(main())
