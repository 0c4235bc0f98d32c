"""The server as a process, as the template runs it."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest_asyncio

import code_interpreter
from tests.code_interpreter.conftest import make_settings
from tests.ports import free_port

SUPERVISOR = Path(code_interpreter.__file__).with_name("supervise.sh")


class Server:
    """A client of a server under its supervisor."""

    def __init__(self, process: subprocess.Popen, url: str, runtime: Path) -> None:
        self.process = process
        self.url = url
        self.runtime = runtime
        self.session = aiohttp.ClientSession(base_url=url)

    @property
    def server_pid(self) -> int:
        """The id of the server itself."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(children[0])

    async def until_healthy(self) -> None:
        """Wait until the server answers."""
        while True:
            try:
                async with self.session.get("/health") as answer:
                    if answer.status == 200:
                        assert await answer.json() == "OK"
                        return
                    raise AssertionError(await answer.text())
            except aiohttp.ClientConnectionError:
                await asyncio.sleep(0.05)

    async def execute(
        self, code: str, headers: dict | None = None, **fields
    ) -> list[dict[str, Any]]:
        """Run code; return all lines."""
        body = {"code": code, "context_id": None, "language": None, "env_vars": None, **fields}
        async with self.session.post("/execute", json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            return [json.loads(line) for line in (await answer.text()).splitlines()]


async def start_server(home: Path, **environment: str) -> Server:
    """Start a server under its supervisor."""
    settings = make_settings(home)
    port = free_port()
    process = subprocess.Popen(
        ["sh", SUPERVISOR, settings.program("python")],
        env={
            "PATH": os.environ["PATH"],
            "TMPDIR": os.environ["TMPDIR"],
            "HOME": str(home),
            "CODE_INTERPRETER_HOST": "127.0.0.1",
            "CODE_INTERPRETER_PORT": str(port),
            "CODE_INTERPRETER_PYTHON": settings.python,
            "CODE_INTERPRETER_RUNTIME": str(settings.runtime),
            "CODE_INTERPRETER_GENERATION": str(settings.generation),
            "CODE_INTERPRETER_ENVIRONMENT_URL": settings.environment_url,
            **environment,
        },
        stdout=sys.stderr,
        stderr=sys.stderr,
    )
    return Server(process, f"http://127.0.0.1:{port}", settings.runtime)


async def stop_server(server: Server) -> None:
    """End a server as the system does."""
    await server.session.close()
    server.process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(server.process.wait, 20) == 0
    assert list(server.runtime.iterdir()) == []
    server.runtime.rmdir()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory) -> AsyncIterator[Server]:
    """A server that answers."""
    started = await start_server(tmp_path_factory.mktemp("home"))
    await started.until_healthy()
    yield started
    await stop_server(started)
