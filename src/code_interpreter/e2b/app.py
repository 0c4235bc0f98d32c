"""The routes of the protocol."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from aiohttp import web

from code_interpreter.e2b import requests
from code_interpreter.e2b.freezes import FreezeWatch
from code_interpreter.e2b.lines import KEEPALIVE, line_of
from code_interpreter.e2b.sandbox import SandboxFacts
from code_interpreter.kernels.context import Context
from code_interpreter.kernels.contexts import Contexts
from code_interpreter.kernels.events import Ended, KernelError, UnknownContextError
from code_interpreter.kernels.run import Run, RunRequest
from code_interpreter.settings import Settings

log = logging.getLogger(__name__)

_MAX_BODY_BYTES = 256 << 20
_CORS = {
    "Access-Control-Allow-Origin": "*",
    "Access-Control-Allow-Methods": "*",
    "Access-Control-Allow-Headers": "*",
}
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class InterpreterApi:
    """Handlers of all routes."""

    def __init__(self, contexts: Contexts, facts: SandboxFacts, settings: Settings) -> None:
        self._contexts = contexts
        self._facts = facts
        self._settings = settings
        self._freezes = FreezeWatch()
        self._leaving: set[asyncio.Task[None]] = set()
        self.problem = ""
        """Why the Python kernel has not started at first; empty if it has."""

    def application(self) -> web.Application:
        """Return the application that serves the routes."""
        app = web.Application(middlewares=[_answer_errors], client_max_size=_MAX_BODY_BYTES)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.post("/execute", self._execute),
                web.post("/contexts", self._create),
                web.get("/contexts", self._list),
                web.post("/contexts/{id}/restart", self._restart),
                web.delete("/contexts/{id}", self._remove),
                web.options("/{path:.*}", self._preflight),
            ]
        )
        app.on_response_prepare.append(_allow_origins)
        app.on_shutdown.append(self._shut_down)
        return app

    async def _shut_down(self, _: web.Application) -> None:
        for task in tuple(self._leaving):
            task.cancel()
        await asyncio.gather(*self._leaving, return_exceptions=True)
        self._freezes.close()

    async def _health(self, _: web.Request) -> web.Response:
        if self.problem and not self._contexts.default(None).is_started:
            return web.Response(status=503, text=self.problem)
        return web.json_response("OK")

    async def _preflight(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _create(self, request: web.Request) -> web.Response:
        wanted = requests.parse_context(await request.read())
        return web.json_response(_shown(await self._contexts.create(wanted.language, wanted.cwd)))

    async def _list(self, _: web.Request) -> web.Response:
        return web.json_response([_shown(context) for context in self._contexts.all()])

    async def _restart(self, request: web.Request) -> web.Response:
        await self._contexts.get(request.match_info["id"]).restart()
        return web.json_response(None)

    async def _remove(self, request: web.Request) -> web.Response:
        await self._contexts.remove(request.match_info["id"])
        return web.json_response(None)

    async def _execute(self, request: web.Request) -> web.StreamResponse:
        wanted = requests.parse_execute(await request.read())
        if wanted.context_id is not None:
            context = self._contexts.get(wanted.context_id)
        else:
            context = self._contexts.default(wanted.language)
            context.language.require_installed()
        token = request.headers.get("X-Access-Token")
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        self._freezes.start()
        run = context.run(
            RunRequest(
                wanted.code,
                wanted.env_vars,
                self._facts.generation(),
                lambda: self._facts.variables(token),
            )
        )
        try:
            await self._send(response, run)
        except (asyncio.CancelledError, ConnectionError):
            self._leave(context, run)
            raise
        await response.write_eof()
        return response

    async def _send(self, response: web.StreamResponse, run: Run) -> None:
        """Send the events of a run. Silence is filled, so that a client that is gone is noticed."""
        while True:
            try:
                async with asyncio.timeout(self._settings.keepalive_seconds):
                    event = await run.next()
            except TimeoutError:
                await response.write(KEEPALIVE)
                continue
            await response.write(line_of(event))
            if isinstance(event, Ended):
                return

    def _leave(self, context: Context, run: Run) -> None:
        """Interrupt the run of a client that is gone, unless a pause has ended the connection."""

        async def decide() -> None:
            if await self._freezes.was_frozen():
                log.info("a run goes on after a pause")
                context.detach(run)
            else:
                context.abandon(run)

        task = asyncio.create_task(decide(), name="client left")
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)


def _shown(context: Context) -> dict[str, str]:
    return {"id": context.id, "language": context.language.name, "cwd": context.cwd}


async def _allow_origins(_: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(_CORS)


@web.middleware
async def _answer_errors(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Answer errors with their text, by the statuses of the protocol."""
    try:
        return await handler(request)
    except requests.BadRequestError as problem:
        return web.Response(status=400, text=str(problem))
    except UnknownContextError as problem:
        return web.Response(status=404, text=str(problem))
    except KernelError as problem:
        return web.Response(status=500, text=str(problem))
