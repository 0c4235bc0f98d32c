"""`paddock up`: every process of one machine, supervised.

The node outlives the control plane, and both outlive a gateway's crash; each comes back by
itself. Stopping goes from the outside in: gateways, control plane, node. Sandboxes go on when
the node stops, and are taken over by the next.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from paddock.app.up import envoy, pool_progress
from paddock.app.up.pool_progress import Warmth
from paddock.app.up.processes import PATIENT_TRIES, TRIES, Process, wait_until
from paddock.app.wiring.secrets import Secrets, load_or_create
from paddock.kit import pidfile
from paddock.kit.errors import ConflictError, InvalidError
from paddock.kit.tasks import background
from paddock.settings import PREFIX, Settings

START_SECONDS = 60.0
LOG_LOOK_SECONDS = 60.0
_LOOK_SECONDS, _LAST_LOOKS = 0.1, 200
"""How often, and how many times more, addresses are looked at that a killed predecessor had."""
_LAST_PORT = 65535
_EVERYWHERE = {"", "0.0.0.0", "::"}  # noqa: S104 - compared, not bound
Say = Callable[[str], None]


class Teller(Protocol):
    """Who is told how the start goes."""

    def say(self, text: str) -> None:
        """Take in what is being done now."""
        ...

    def warm(self, warmth: Warmth) -> None:
        """Take in how far the first pool is."""
        ...


class Installation:
    """The processes of one machine."""

    def __init__(self, settings: Settings, config: Path | None = None) -> None:
        self.settings = settings
        logs = settings.state / "logs"
        role = [sys.executable, "-m", "paddock.app"]
        if config is not None:
            role += ["--config", str(config)]
        self.node = Process(
            "node",
            [
                *(sys.executable, "-m", "paddock.runtime.local.node.process"),
                *("--state", str(settings.state / "node")),
                *("--socket", settings.node_socket),
                *("--log-level", settings.log_level),
            ],
            log_file=logs / "node.log",
        )
        self.control = Process("control", [*role, "control"], log_file=logs / "control.log")
        count = settings.gateways or os.cpu_count() or 1
        self.gateways = tuple(
            Process(
                f"gateway-{number}",
                [*role, "gateway"],
                log_file=logs / f"gateway-{number}.log",
                environment=_admin_port(settings, number),
            )
            for number in range(count)
        )
        self.tls = envoy.front(settings)

    async def refuse_if_taken(self, *, after_a_kill: bool = False) -> None:
        """Raise where something else is at our addresses: it would be taken for ours.

        `after_a_kill` of our predecessor its processes still end, and are waited for.
        """
        self._check_ports()
        looks = _LAST_LOOKS if after_a_kill else 0
        while (problem := self._taken()) is not None:
            if not looks:
                raise problem
            looks -= 1
            await asyncio.sleep(_LOOK_SECONDS)

    def _places(self) -> list[tuple[str, str, int, str]]:
        """Give every address that we are about to have: whose, host, port, how it is chosen."""
        settings = self.settings
        places = [
            ("the control plane", settings.api_host, settings.api_port, "PADDOCK_API_PORT"),
            ("clients", settings.host, settings.port, "--port or PADDOCK_PORT"),
        ]
        if self.tls is not None:
            places.append(("TLS", settings.tls_host, settings.tls_port, "PADDOCK_TLS_PORT"))
            places.append(
                ("TLS to reach gateways", "127.0.0.1", settings.front_port, "PADDOCK_FRONT_PORT")
            )
        if settings.admin_port:
            places += [
                (f"metrics of {gateway.name}", settings.admin_host, port, "PADDOCK_ADMIN_PORT")
                for port, gateway in enumerate(self.gateways, settings.admin_port)
            ]
        return places

    def _check_ports(self) -> None:
        """Refuse ports that there are not, and one for two purposes: counting up may lead there."""
        known: list[tuple[str, str, int]] = []
        for what, host, port, choice in self._places():
            if port > _LAST_PORT:
                message = f"port {port}, the one for {what}, is beyond {_LAST_PORT}"
                raise InvalidError(message, hint=f"choose a lower one with {choice}")
            for other, its_host, its_port in known:
                if port == its_port and (host == its_host or {host, its_host} & _EVERYWHERE):
                    message = f"port {port} is the one for {other} and for {what}"
                    raise InvalidError(message, hint=f"choose another with {choice}")
            known.append((what, host, port))

    def _taken(self) -> ConflictError | None:
        for what, host, port, choice in self._places():
            if _listens(host, port):
                return ConflictError(
                    f"something listens on {host}:{port} already, the address for {what}",
                    hint=f"stop it, or choose another port with {choice}",
                )
        return None

    async def run(
        self,
        stop: asyncio.Event,
        *,
        token: str,
        teller: Teller,
        on_ready: Callable[[], None],
        after_a_kill: bool = False,
    ) -> None:
        """Run everything until told to stop."""
        await self.refuse_if_taken(after_a_kill=after_a_kill)
        say = teller.say
        # A predecessor's process that still ends has the state: ours is refused, and tries again.
        tries = PATIENT_TRIES if after_a_kill else TRIES
        async with contextlib.AsyncExitStack() as stack:
            if self.settings.runtime == "local":
                await self._start(stack, self.node, say)
                await wait_until(
                    lambda: _answers(self.settings.node_socket),
                    self.node,
                    seconds=START_SECONDS,
                    what="the node",
                    tries=tries,
                )
            await self._start(stack, self.control, say)
            await wait_until(
                lambda: _listens(self.settings.api_host, self.settings.api_port),
                self.control,
                seconds=START_SECONDS,
                what="the control plane",
                tries=tries,
            )
            for gateway in self.gateways:
                await self._start(stack, gateway, say)
            await wait_until(
                lambda: _listens(self.settings.host, self.settings.port),
                self.gateways[0],
                seconds=START_SECONDS,
                what="the gateway",
            )
            if self.tls is not None:
                await self._start(stack, self.tls, say)
                await wait_until(
                    lambda: _listens(self.settings.tls_host, self.settings.tls_port),
                    self.tls,
                    seconds=START_SECONDS,
                    what="TLS",
                )
            if not await self._warm(stop, token, teller):
                return
            on_ready()
            while not stop.is_set():
                for process in (self.node, self.control, *self.gateways):
                    process.rotate_log()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOG_LOOK_SECONDS):
                        await stop.wait()

    async def _warm(self, stop: asyncio.Event, token: str, teller: Teller) -> bool:
        """Wait for the first pool; says whether anybody still wants to know."""
        work = pool_progress.follow(self.settings, token, teller.warm)
        async with (
            background(work, name="warming") as warmed,
            background(stop.wait(), name="stop") as stopped,
        ):
            await asyncio.wait((warmed, stopped), return_when=asyncio.FIRST_COMPLETED)
            if stopped.done():
                return False
            warmth = await warmed
        if not warmth.is_enough:
            teller.say(
                f"only {warmth.available} of {warmth.desired} sandboxes are warm: "
                f"{warmth.problem or 'the others take longer'}"
            )
        return True

    @staticmethod
    async def _start(stack: contextlib.AsyncExitStack, process: Process, say: Say) -> None:
        say(f"starting {process.name}")
        task = asyncio.get_running_loop().create_task(process.keep_running(), name=process.name)

        async def end() -> None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

        stack.push_async_callback(end)


def _admin_port(settings: Settings, number: int) -> dict[str, str]:
    """Give each gateway of a machine an admin port of its own: they cannot share one."""
    if not settings.admin_port:
        return {}
    return {f"{PREFIX}ADMIN_PORT": str(settings.admin_port + number)}


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(path) == 0


def _listens(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    target = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        return probe.connect_ex((target, port)) == 0


def run(
    settings: Settings,
    config: Path | None,
    *,
    teller: Teller,
    on_ready: Callable[[Secrets], None],
) -> None:
    """Run everything until SIGTERM or SIGINT."""
    secrets = load_or_create(settings)

    async def main(*, after_a_kill: bool) -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        installation = Installation(settings, config)
        await installation.run(
            stop,
            token=secrets.token,
            teller=teller,
            on_ready=lambda: on_ready(secrets),
            after_a_kill=after_a_kill,
        )

    for directory in (settings.state, settings.run):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with pidfile.lock(
        settings.run / "paddock.pid",
        what="Paddock",
        hint="`paddock status` shows it, `paddock down` stops it",
    ) as after_a_kill:
        asyncio.run(main(after_a_kill=after_a_kill))
