"""`paddock run` as a process, with the API and the code interpreter of a sandbox on loopback."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from aiohttp import web

from tests.run_code.server import Behaviour, InterpreterServer, Run, serving

PADDOCK = Path(sys.executable).with_name("paddock")
BOX = {
    "sandboxID": "i1",
    "templateID": "code-interpreter-v1",
    "clientID": "paddock",
    "envdVersion": "0.6.13",
    "envdAccessToken": "secret",
    "trafficAccessToken": "traffic",
}


class Done(NamedTuple):
    code: int | None
    out: str
    err: str


def after_prelude(behaviour: Behaviour) -> Behaviour:
    """Run the code that passes the arguments in silence."""

    async def behave(run: Run) -> None:
        if "argv[:]" not in run.body["code"]:
            return await behaviour(run)
        return await run.send(type="end_of_execution")

    return behave


class FakeApi:
    """The routes of the API that `paddock run` uses, and what it requested."""

    def __init__(self, interpreter: InterpreterServer, directory: Path) -> None:
        self.interpreter = interpreter
        self.directory = directory
        self.created: list[dict] = []
        self.killed: list[str] = []
        self.refusal: tuple[int, str] | None = None
        self.creating = asyncio.Event()
        self.may_create = asyncio.Event()
        self.may_create.set()

    async def create(self, request: web.Request) -> web.Response:
        if self.refusal is not None:
            status, message = self.refusal
            return web.json_response({"code": status, "message": message}, status=status)
        self.creating.set()
        await self.may_create.wait()
        self.created.append(await request.json())
        return web.json_response(BOX, status=201)

    async def kill(self, request: web.Request) -> web.Response:
        self.killed.append(request.match_info["sandbox"])
        return web.Response(status=204)

    @property
    def codes(self) -> list[str]:
        return [body["code"] for body in self.interpreter.bodies]

    async def start(self, *arguments: str) -> asyncio.subprocess.Process:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PADDOCK")}
        return await asyncio.create_subprocess_exec(
            *(str(PADDOCK), "--url", self.interpreter.url, "run", *arguments),
            cwd=self.directory,
            env=kept | {"E2B_API_KEY": "e2b_key", "NO_COLOR": "1", "COLUMNS": "200"},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )

    async def run(self, *arguments: str, stdin: str = "", seconds: float = 60) -> Done:
        process = await self.start(*arguments)
        out, err = await asyncio.wait_for(process.communicate(stdin.encode()), seconds)
        return Done(process.returncode, out.decode(), err.decode())

    async def json(self, *arguments: str) -> dict:
        return json.loads((await self.run("-o", "json", *arguments)).out)


@asynccontextmanager
async def fake_api(interpreter: InterpreterServer, directory: Path) -> AsyncIterator[FakeApi]:
    """Serve the API; every sandbox has this code interpreter."""
    api = FakeApi(interpreter, directory)

    def add_routes(app: web.Application) -> None:
        app.router.add_post("/v2/sandboxes", api.create)
        app.router.add_delete("/sandboxes/{sandbox}", api.kill)

    async with serving(api.interpreter.execute, add_routes) as api.interpreter.url:
        yield api


Serve = Callable[[Behaviour], Awaitable[FakeApi]]


@pytest.fixture
async def serve(tmp_path: Path) -> AsyncIterator[Serve]:
    """Return a function that serves the API until the end of the test."""
    async with AsyncExitStack() as stack:

        async def start(behaviour: Behaviour) -> FakeApi:
            interpreter = InterpreterServer(after_prelude(behaviour))
            return await stack.enter_async_context(fake_api(interpreter, tmp_path))

        yield start
