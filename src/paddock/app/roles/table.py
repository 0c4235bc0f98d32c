"""The processes of an installation: each role runs in one, until it is told to stop."""

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable

import uvloop

from paddock.app.roles import api, controllers, gateway, node
from paddock.app.roles.control_plane import ControlPlane
from paddock.app.wiring import backends
from paddock.app.wiring.secrets import load_or_create
from paddock.kit import logs
from paddock.settings import Settings

_SWITCH_SECONDS = 0.0005

Role = Callable[[Settings, asyncio.Event, Callable[[], None]], Awaitable[None]]


async def control(settings: Settings, stop: asyncio.Event, on_ready: Callable[[], None]) -> None:
    """Run the control plane."""
    secrets = load_or_create(settings)
    store = await backends.open_store(settings)
    runtime = backends.open_runtime(settings)
    try:
        plane = ControlPlane(settings, secrets, store=store, runtime=runtime)
        await plane.run(stop, on_ready=on_ready)
    finally:
        await store.close()


ROLES: dict[str, Role] = {
    "control": control,
    "api": api.run,
    "controllers": controllers.run,
    "gateway": gateway.run,
    "node": node.run,
}


def run(name: str, settings: Settings, *, on_ready: Callable[[], None]) -> None:
    """Run a role until SIGTERM or SIGINT."""
    logs.configure(level=settings.log_level, json=settings.log_json)
    # The store writes in a thread: whoever waits for that must not wait 5 ms more for a turn.
    sys.setswitchinterval(_SWITCH_SECONDS)

    async def main() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        await ROLES[name](settings, stop, on_ready)

    uvloop.run(main())
