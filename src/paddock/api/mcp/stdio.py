"""Serves the tools on standard input and output, to the client that started this process."""

import asyncio
import logging
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from uuid import uuid4

from paddock.api.mcp.server import USER_AGENT, build_server
from paddock.api.mcp.session import McpSession, SessionMemory
from paddock.client.sandboxes import ClientAddresses, HttpSandboxes
from paddock.kit.errors import PaddockError
from paddock.kit.logs import fields
from paddock.run_code.http import sandbox_session

log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


async def serve(url: str, headers: Mapping[str, str], *, template: str, idle_seconds: int) -> None:
    """Serve until the client closes standard input or a signal arrives; then pause the sandbox.

    The process is the session: this holds for clients with and without sessions.
    """
    told = _signals()
    async with sandbox_session() as http:
        session = McpSession(
            HttpSandboxes(
                http, ClientAddresses(url, url, url), {"User-Agent": USER_AGENT, **headers}
            ),
            uuid4().hex,
            SessionMemory(),
            template=template,
            idle_seconds=idle_seconds,
        )
        server = build_server(lambda _: session)
        serving = asyncio.create_task(server.run_stdio_async(), name="mcp")
        telling = asyncio.create_task(told.wait(), name="signals")
        await asyncio.wait((serving, telling), return_when=asyncio.FIRST_COMPLETED)
        await _end(session)
        if not serving.done():
            # A thread of the package waits for standard input, and cannot be cancelled.
            os._exit(0)
        telling.cancel()
        await serving


def _signals() -> asyncio.Event:
    told = asyncio.Event()
    for number in _SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    return told


async def _end(session: McpSession) -> None:
    """Pause the sandbox; it pauses at its timeout if this fails."""
    with suppress(TimeoutError):
        try:
            await session.end()
        except PaddockError as error:
            log.warning("sandbox was not paused", extra=fields(error=error.message))
