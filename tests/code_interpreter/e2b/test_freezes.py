"""A process notices that it was frozen, however shortly, and takes nothing else for it."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import code_interpreter

ROOT = Path(code_interpreter.__file__).parents[1]
PROGRAM = """
import asyncio, signal, subprocess
from code_interpreter.e2b.freezes import FreezeWatch

async def main():
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, lambda: print("signal", flush=True))
    watch = FreezeWatch()
    for _ in range(2):
        watch.start()
    print("ready", flush=True)
    while await asyncio.to_thread(input):
        subprocess.run(["true"])
        print(await watch.was_frozen(), flush=True)
    watch.close()

asyncio.run(main())
"""


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    """A process that says on request whether it was frozen."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as started:
        assert answer(started) == "ready"
        yield started
        print(file=started.stdin, flush=True)
        assert started.wait() == 0


def answer(process: subprocess.Popen[str], request: str = "") -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    if request:
        print(request, file=process.stdin, flush=True)
    return process.stdout.readline().strip()


def test_the_shortest_freeze_is_noticed(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    process.send_signal(signal.SIGCONT)
    assert answer(process, "was it?") == "True"


def test_signals_and_children_are_no_freeze(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGUSR1)
    assert answer(process) == "signal"
    assert answer(process, "was it?") == "False"
