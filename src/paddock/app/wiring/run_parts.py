"""Runs the parts of a process until it is stopped or one of them fails.

`engine/supervisor.py` starts and stops them in order. This module makes parts of servers, contexts
and groups of coroutines.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from paddock.app.wiring.http_server import AsgiServer
from paddock.engine.supervisor import Part, StartGroup, Supervisor
from paddock.kit.tasks import background

STOP_SECONDS = 12.0
"""Time for all parts to end: less than `paddock up` and Kubernetes wait for a process."""


async def run(parts: Iterable[Part], stop: asyncio.Event) -> None:
    """Run parts until `stop` is set; raise the error of a part that fails."""
    supervisor = Supervisor(stop_seconds=STOP_SECONDS)
    for part in parts:
        supervisor.add(part)

    async def forward_stop() -> None:
        await stop.wait()
        supervisor.stop()

    async with background(forward_stop(), name="stop"):
        await supervisor.run()


def server_part(server: AsgiServer, group: StartGroup = StartGroup.API) -> Part:
    """Return a part that serves; when stopped, it finishes the requests in flight."""

    async def serve() -> None:
        async with background(server.run_until_stopped(), name="http") as running:
            try:
                await asyncio.shield(running)
            except asyncio.CancelledError:
                server.should_exit = True
                await running
                raise

    return Part(name="http", group=group, run=serve)


def context_part(
    name: str, group: StartGroup, context: Callable[[], AbstractAsyncContextManager[object]]
) -> Part:
    """Return a part that keeps a context entered; it is ready once the context is entered."""
    entered = asyncio.Event()

    async def hold() -> None:
        async with context():
            entered.set()
            await asyncio.Event().wait()

    async def ready() -> None:
        await entered.wait()

    return Part(name=name, group=group, run=hold, ready=ready)


def group_part(name: str, work: Callable[[], Mapping[str, Coroutine[Any, Any, None]]]) -> Part:
    """Return a part that runs several coroutines; the first error of one ends all."""

    async def run_all() -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for task, coroutine in work().items():
                    tasks.create_task(coroutine, name=task)
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from group

    return Part(name=name, group=StartGroup.OTHERS, run=run_all)
