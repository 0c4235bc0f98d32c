"""The roles by name, and how a process runs one."""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable

import uvloop

from paddock.app.roles import api, control_plane, controllers, gateway, node
from paddock.kit import logs
from paddock.settings import PRIVATE_UMASK, Settings, require_loopback_or_consent

_SWITCH_SECONDS = 0.0005

Run = Callable[[Settings, asyncio.Event, Callable[[], None]], Awaitable[None]]

ROLES: dict[str, Run] = {
    "control": control_plane.run,
    "api": api.run,
    "controllers": controllers.run,
    "gateway": gateway.run,
    "node": node.run,
}


def run(name: str, settings: Settings, *, on_ready: Callable[[], None]) -> None:
    """Run a role until SIGTERM or SIGINT."""
    if settings.store != "kubernetes":  # in a pod, the cluster's network is around it
        require_loopback_or_consent(settings)
    logs.configure(level=settings.log_level, json=settings.log_json)
    os.umask(PRIVATE_UMASK)
    # The store writes in a thread: by default, handing the GIL back to the loop may take 5 ms.
    sys.setswitchinterval(_SWITCH_SECONDS)

    async def main() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        await ROLES[name](settings, stop, on_ready)

    uvloop.run(main())
