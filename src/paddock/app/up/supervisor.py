"""`paddock up`: every process of one machine, supervised.

Each process is restarted when it ends, without affecting the others. The stop goes from the
outside in: gateways, control plane, node. Sandboxes keep running when the node stops, and the next
node adopts them.
"""

import asyncio
import contextlib
import os
import signal
import socket
import stat
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec

from paddock.app.up import envoy, pool_progress
from paddock.app.up.processes import PATIENT_TRIES, TRIES, SupervisedProcess, wait_until
from paddock.app.up.progress import Progress
from paddock.app.wiring.secrets import Secrets, load_or_create
from paddock.kit import pidfile
from paddock.kit.errors import ConflictError, InvalidError
from paddock.kit.tasks import background
from paddock.runtime import host_paths, image_settings, outbound_settings
from paddock.runtime.rate_settings import rates_of
from paddock.settings import PREFIX, PRIVATE_UMASK, PURGE_FILE, Settings

START_SECONDS = 60.0
LOG_ROTATE_SECONDS = 60.0
_POLL_SECONDS, _POLLS = 0.1, 200
"""How often, and how many times, the ports of a killed predecessor are checked."""
_LAST_PORT = 65535
_ANY_ADDRESS = {"", "0.0.0.0", "::"}  # noqa: S104 - compared, not bound


class MachineSupervisor:
    """The supervised processes of one machine."""

    def __init__(self, settings: Settings, config: Path | None = None) -> None:
        self.settings = settings
        logs = settings.state / "logs"
        role = [sys.executable, "-m", "paddock.app"]
        if config is not None:
            role += ["--config", str(config)]
        self.node = SupervisedProcess(
            "node",
            [
                *(sys.executable, "-m", "paddock.runtime.local.node.process"),
                *("--state", str(settings.state / "node")),
                *("--socket", settings.node_socket),
                *("--image-cache", str(settings.image_cache)),
                *("--log-level", settings.log_level),
                *("--outbound", str(outbound_settings.node_file(settings))),
                *("--images", str(image_settings.node_file(settings))),
                *("--rates", msgspec.json.encode(rates_of(settings)).decode()),
                *("--kernel-memory", msgspec.json.encode(_kernel_memory(settings)).decode()),
                *("--clone-hook-seconds", str(settings.clone_hook_seconds)),
                *_disk_reserve(settings),
                f"--heavy-work={settings.heavy_work}",
                f"--heavy-work-per-team={settings.heavy_work_per_team}",
                *(f"--host-path={path}" for path in host_paths.parse(settings.host_paths)),
            ],
            log_file=logs / "node.log",
        )
        self.control = SupervisedProcess(
            "control", [*role, "control"], log_file=logs / "control.log"
        )
        self.gateways = tuple(
            SupervisedProcess(
                f"gateway-{number}",
                [*role, "gateway"],
                log_file=logs / f"gateway-{number}.log",
                environment=_admin_port(settings, number),
            )
            for number in range(settings.gateway_count)
        )
        self.tls = envoy.front(settings)

    async def require_free_ports(self, *, after_a_kill: bool = False) -> None:
        """Raise if a process that is not ours listens on one of our ports.

        `after_a_kill` of the predecessor its processes may still be ending: wait for them.
        """
        self._check_ports()
        polls = _POLLS if after_a_kill else 0
        while (problem := self._port_conflict()) is not None:
            if not polls:
                raise problem
            polls -= 1
            await asyncio.sleep(_POLL_SECONDS)

    def _endpoints(self) -> list[tuple[str, str, int, str]]:
        """Return the purpose, host, port and setting of every port that we will listen on."""
        settings = self.settings
        endpoints = [
            ("the control plane", settings.api_host, settings.api_port, "PADDOCK_API_PORT"),
            ("clients", settings.host, settings.port, "--port or PADDOCK_PORT"),
        ]
        if settings.kube_port:
            endpoints.append(("kubectl", "127.0.0.1", settings.kube_port, "PADDOCK_KUBE_PORT"))
        if self.tls is not None:
            endpoints.append(("TLS", settings.tls_host, settings.tls_port, "PADDOCK_TLS_PORT"))
            endpoints.append(
                ("TLS to reach gateways", "127.0.0.1", settings.front_port, "PADDOCK_FRONT_PORT")
            )
        if settings.admin_port:
            endpoints += [
                (f"metrics of {gateway.name}", settings.admin_host, port, "PADDOCK_ADMIN_PORT")
                for port, gateway in enumerate(self.gateways, settings.admin_port)
            ]
        return endpoints

    def _check_ports(self) -> None:
        """Refuse invalid ports and one port for two purposes: admin ports are counted up."""
        known: list[tuple[str, str, int]] = []
        for what, host, port, choice in self._endpoints():
            if port > _LAST_PORT:
                message = f"port {port} for {what} is larger than {_LAST_PORT}"
                raise InvalidError(message, hint=f"choose a lower one with {choice}")
            for other, its_host, its_port in known:
                if port == its_port and (host == its_host or {host, its_host} & _ANY_ADDRESS):
                    message = f"port {port} is set for {other} and for {what}"
                    raise InvalidError(message, hint=f"choose another with {choice}")
            known.append((what, host, port))

    def _port_conflict(self) -> ConflictError | None:
        for what, host, port, choice in self._endpoints():
            if _listens(host, port):
                return ConflictError(
                    f"another process listens on {host}:{port}, the address for {what}",
                    hint=f"stop it, or choose another port with {choice}",
                )
        return None

    async def run(
        self,
        stop: asyncio.Event,
        *,
        token: str,
        progress: Progress,
        on_ready: Callable[[], None],
        after_a_kill: bool = False,
        once_ready: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        """Run all processes until `stop` is set. `once_ready` is work that nothing waits for."""
        await self.require_free_ports(after_a_kill=after_a_kill)
        # A predecessor that is still ending holds the lock of the state: ours fails and retries.
        tries = PATIENT_TRIES if after_a_kill else TRIES
        async with contextlib.AsyncExitStack() as stack:
            settings = self.settings
            if settings.runtime == "local":
                outbound_settings.write_node_file(settings)
                image_settings.write_node_file(settings)
                await self._start(stack, self.node, progress)
                await _started(self.node, "the node", lambda: _accepts(settings.node_socket), tries)
            await self._start(stack, self.control, progress)
            await _started(
                self.control,
                "the control plane",
                lambda: _listens(settings.api_host, settings.api_port),
                tries,
            )
            for gateway in self.gateways:
                await self._start(stack, gateway, progress)
            await _started(
                self.gateways[0], "the gateway", lambda: _listens(settings.host, settings.port)
            )
            if self.tls is not None:
                await self._start(stack, self.tls, progress)
                await _started(
                    self.tls, "TLS", lambda: _listens(settings.tls_host, settings.tls_port)
                )
            if not await self._warm(stop, token, progress):
                return
            on_ready()
            if once_ready is not None:
                await stack.enter_async_context(background(once_ready(), name="once ready"))
            while not stop.is_set():
                for process in (self.node, self.control, *self.gateways):
                    process.rotate_log()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOG_ROTATE_SECONDS):
                        await stop.wait()

    async def _warm(self, stop: asyncio.Event, token: str, progress: Progress) -> bool:
        """Wait for the first pool; return False if stopped meanwhile."""
        work = pool_progress.follow(self.settings, token, progress.pool)
        async with (
            background(work, name="warming") as warmed,
            background(stop.wait(), name="stop") as stopped,
        ):
            await asyncio.wait((warmed, stopped), return_when=asyncio.FIRST_COMPLETED)
            if stopped.done():
                return False
            pool = await warmed
        if not pool.is_complete:
            progress.step(
                f"only {pool.available} of {pool.desired} sandboxes are warm: "
                f"{pool.problem or 'the others need more time'}"
            )
        return True

    @staticmethod
    async def _start(
        stack: contextlib.AsyncExitStack, process: SupervisedProcess, progress: Progress
    ) -> None:
        progress.step(f"starting {process.name}")
        task = asyncio.get_running_loop().create_task(process.keep_running(), name=process.name)

        async def end() -> None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

        stack.push_async_callback(end)


async def _started(
    process: SupervisedProcess, what: str, check: Callable[[], bool], tries: int = TRIES
) -> None:
    await wait_until(check, process, seconds=START_SECONDS, what=what, tries=tries)


def _disk_reserve(settings: Settings) -> tuple[str, ...]:
    reserve = settings.disk_reserve_bytes
    return () if reserve is None else (f"--disk-reserve-bytes={reserve}",)


def _kernel_memory(settings: Settings) -> dict[str, int]:
    return {
        "percent": settings.kernel_memory_percent,
        "least_bytes": settings.kernel_memory_min_bytes,
        "pending_signals": settings.pending_signals_per_sandbox,
    }


def _admin_port(settings: Settings, number: int) -> dict[str, str]:
    """Return the admin port of one gateway: the gateways of a machine cannot share one."""
    if not settings.admin_port:
        return {}
    return {f"{PREFIX}ADMIN_PORT": str(settings.admin_port + number)}


def _accepts(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(path) == 0


def _listens(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    target = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        return probe.connect_ex((target, port)) == 0


def make_private(directory: Path) -> None:
    """Create a directory of the installation; close it and its files to other users.

    An older version, or a user, may have created it with other modes.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory.chmod(0o700)
    for path in (*directory.iterdir(), *directory.glob("logs/*")):
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            if not path.is_symlink():
                path.chmod(stat.S_IMODE(path.stat().st_mode) & 0o700)


def run(
    settings: Settings,
    config: Path | None,
    *,
    progress: Progress,
    on_ready: Callable[[Secrets], None],
    once_ready: Callable[[], Coroutine[Any, Any, None]] | None = None,
) -> bool:
    """Run all processes until SIGTERM or SIGINT; return whether a purge follows.

    `once_ready` is work in the background, begun after `on_ready`.
    """
    os.umask(PRIVATE_UMASK)  # also of the processes that are started
    for directory in (settings.state, settings.run):
        make_private(directory)
    secrets = load_or_create(settings)

    async def main(*, after_a_kill: bool) -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        supervisor = MachineSupervisor(settings, config)
        await supervisor.run(
            stop,
            token=secrets.token,
            progress=progress,
            on_ready=lambda: on_ready(secrets),
            after_a_kill=after_a_kill,
            once_ready=once_ready,
        )

    with pidfile.lock(
        settings.run / "paddock.pid",
        what="Paddock",
        hint="`paddock status` shows it, `paddock down` stops it",
    ) as after_a_kill:
        asyncio.run(main(after_a_kill=after_a_kill))
        # Read before the lock is released: the purge waits for it, and removes the file.
        return _is_purge_announced(settings)


def _is_purge_announced(settings: Settings) -> bool:
    """Whether `paddock down --purge` stopped this process."""
    try:
        return (settings.run / PURGE_FILE).read_text() == str(os.getpid())
    except FileNotFoundError:
        return False
