"""Starts of the server when its Python kernel is slow, or does not start."""

import asyncio
import signal
from pathlib import Path

import pytest

from code_interpreter.e2b import server
from code_interpreter.e2b.app import InterpreterApi
from code_interpreter.kernels.events import KernelError
from tests.code_interpreter.e2b.conftest import start_server


class SlowContexts:
    """A default context whose kernel starts at the third attempt."""

    def __init__(self) -> None:
        self.attempts = 0

    @property
    def is_started(self) -> bool:
        return self.attempts >= 3

    async def start(self) -> None:
        self.attempts += 1
        if not self.is_started:
            raise KernelError("no answer within 60 s")

    def default(self, _: str | None) -> "SlowContexts":
        return self


@pytest.mark.looptime
async def test_a_kernel_that_was_slow_is_started_again_and_the_server_gets_healthy() -> None:
    contexts = SlowContexts()
    api = InterpreterApi(contexts, None, None)  # pyright: ignore[reportArgumentType]
    await server._start(contexts, api)
    assert (await api._health(None)).status == 503
    await server.start_again(contexts)
    assert (await api._health(None)).status == 200
    assert contexts.attempts == 3


async def test_a_server_obeys_while_its_kernel_starts(tmp_path: Path) -> None:
    silent = tmp_path / "python"
    silent.write_text("#!/bin/sh\nexec sleep 1000\n")
    silent.chmod(0o755)
    started = await start_server(tmp_path, CODE_INTERPRETER_PYTHON=str(silent))
    await started.session.close()
    while not list(started.runtime.glob("*.pid")):
        await asyncio.sleep(0.02)
    started.process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(started.process.wait, 20) == 0
    assert list(started.runtime.iterdir()) == []
    started.runtime.rmdir()
