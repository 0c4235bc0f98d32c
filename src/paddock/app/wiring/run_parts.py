"""Runs the parts of one process in order, until it is told to stop or one of them fails.

In which order is `engine.supervisor`'s business; here is how servers and contexts become parts.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from paddock.app.wiring.http_server import Server
from paddock.engine.supervisor import Part, StartGroup, Supervisor
from paddock.kit.tasks import background

STOP_SECONDS = 12.0
"""All parts together have so long to end: less than whoever started the process waits for it."""


async def run(parts: Iterable[Part], stop: asyncio.Event) -> None:
    """Run parts until told to stop; what makes one of them fail is raised."""
    supervisor = Supervisor(stop_seconds=STOP_SECONDS)
    for part in parts:
        supervisor.add(part)

    async def pass_on() -> None:
        await stop.wait()
        supervisor.stop()

    async with background(pass_on(), name="stop"):
        await supervisor.run()


def serving(server: Server, group: StartGroup = StartGroup.API) -> Part:
    """Serve; requests under way are finished first when it is stopped."""

    async def serve() -> None:
        async with background(server.run_until_stopped(), name="http") as running:
            try:
                await asyncio.shield(running)
            except asyncio.CancelledError:
                server.should_exit = True
                await running
                raise

    return Part(name="http", group=group, run=serve)


def held(
    name: str, group: StartGroup, context: Callable[[], AbstractAsyncContextManager[object]]
) -> Part:
    """Keep a context entered; it is ready when its body would begin."""
    entered = asyncio.Event()

    async def hold() -> None:
        async with context():
            entered.set()
            await asyncio.Event().wait()

    async def ready() -> None:
        await entered.wait()

    return Part(name=name, group=group, run=hold, ready=ready)


def together(name: str, work: Callable[[], Mapping[str, Coroutine[Any, Any, None]]]) -> Part:
    """Run several things that only make sense together; the first error of one is theirs."""

    async def run_all() -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for each, coroutine in work().items():
                    tasks.create_task(coroutine, name=each)
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from group

    return Part(name=name, group=StartGroup.OTHERS, run=run_all)
