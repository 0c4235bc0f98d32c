"""The process of the server: listen, start the Python kernel, serve until a signal."""

import asyncio
import logging
import signal
import socket

from aiohttp import web

from code_interpreter.e2b.app import InterpreterApi
from code_interpreter.e2b.sandbox import SandboxFacts
from code_interpreter.kernels.contexts import Contexts
from code_interpreter.kernels.events import KernelError
from code_interpreter.settings import Settings

log = logging.getLogger(__name__)

_BACKLOG = 1024
_RETRY_SECONDS = 5.0
_LONGEST_RETRY_SECONDS = 300.0


async def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT, then end all kernels."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    # A second server fails here, before it touches the kernels of the first one.
    listener = socket.create_server((settings.host, settings.port), backlog=_BACKLOG)
    contexts = Contexts(settings)
    api = InterpreterApi(
        contexts, SandboxFacts(settings.environment_url, settings.generation), settings
    )
    # A client that disconnects cancels its handler.
    runner = web.AppRunner(
        api.application(), handler_cancellation=True, access_log=None, shutdown_timeout=1.0
    )
    starting = asyncio.create_task(_start(contexts, api), name="start")
    stopping = asyncio.create_task(stopped.wait(), name="stop")
    try:
        await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not stopped.is_set():
            await starting
            if api.problem:
                starting = asyncio.create_task(start_again(contexts), name="start again")
            await runner.setup()
            await web.SockSite(runner, listener).start()
            log.info("serving at port %d", settings.port)
            await stopped.wait()
    finally:
        for task in (starting, stopping):
            task.cancel()
        await asyncio.gather(starting, stopping, return_exceptions=True)
        await contexts.close()
        await runner.cleanup()
        listener.close()


async def _start(contexts: Contexts, api: InterpreterApi) -> None:
    try:
        await contexts.start()
    except KernelError as problem:
        log.warning("the Python kernel does not start: %s", problem)
        api.problem = str(problem)


async def start_again(contexts: Contexts) -> None:
    """Start the default kernel, which was perhaps only slow; wait longer after each failure."""
    seconds = _RETRY_SECONDS
    while not contexts.default(None).is_started:
        await asyncio.sleep(seconds)
        try:
            await contexts.default(None).start()
        except KernelError as problem:
            log.warning("the Python kernel does not start: %s", problem)
        seconds = min(2 * seconds, _LONGEST_RETRY_SECONDS)
