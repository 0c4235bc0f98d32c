"""Kernels that are not started to their end leave no process behind."""

import asyncio
import functools
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
import zmq.asyncio

from code_interpreter.kernels.bash import BashKernel
from code_interpreter.kernels.event_queue import EventQueue
from code_interpreter.kernels.events import Failure
from code_interpreter.kernels.jupyter import JupyterKernel
from code_interpreter.kernels.languages import Language
from code_interpreter.kernels.pending import PendingRun
from code_interpreter.kernels.process import KernelProcess
from code_interpreter.kernels.wire import Session


@pytest.fixture
def runtime() -> Iterator[Path]:
    """A short path: sockets are in it."""
    made = Path(tempfile.mkdtemp(prefix="ci"))
    yield made
    shutil.rmtree(made)


@pytest.fixture
def sockets() -> Iterator[zmq.asyncio.Context]:
    """What a kernel would connect with."""
    with zmq.asyncio.Context() as made:
        yield made


def children() -> set[str]:
    pid = os.getpid()
    found: set[str] = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        found.update((task / "children").read_text().split())
    return found


def language(command: str) -> Language:
    return Language("fake", (command,), lambda _: "")


K = TypeVar("K", BashKernel, JupyterKernel)


def kernel(runtime: Path, command: str, kind: Callable[..., K]) -> K:
    return kind(
        "k-1",
        language(command),
        runtime=runtime,
        cwd=Path("/"),
        environment={"PATH": os.environ["PATH"]},
        start_seconds=60.0,
    )


async def test_a_shell_whose_start_is_cancelled_is_ended(runtime: Path) -> None:
    # Reads its input and never answers.
    silent = runtime / "silent"
    silent.write_text("#!/bin/sh\nexec cat >/dev/null\n")
    silent.chmod(0o755)
    before = children()
    shell = kernel(runtime, str(silent), BashKernel)
    starting = asyncio.create_task(shell.start())
    while children() == before:
        await asyncio.sleep(0)
    starting.cancel()
    await asyncio.wait((starting,))
    assert starting.cancelled()
    assert children() == before
    assert not list(runtime.glob("*.pid"))


@pytest.mark.parametrize("fault", ["pid file", "thread"])
async def test_a_process_that_cannot_be_watched_is_ended(
    runtime: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    directory = runtime / "absent" if fault == "pid file" else runtime
    if fault == "thread":
        monkeypatch.setattr(threading.Thread, "start", fail)
    before = children()
    with pytest.raises((OSError, RuntimeError)):
        KernelProcess("k-1", ["sleep", "1000"], runtime=directory, cwd=Path("/"), environment={})
    monkeypatch.undo()
    assert children() == before
    assert not list(runtime.glob("*.pid"))


async def test_a_shell_that_is_stopped_during_a_run_is_no_internal_error(runtime: Path) -> None:
    shell = kernel(runtime, "/bin/bash", BashKernel)
    await shell.start()
    running = asyncio.create_task(shell.execute("sleep 1000", EventQueue(1 << 20)))
    await asyncio.sleep(0)
    await shell.stop()
    [problem] = await asyncio.gather(running, return_exceptions=True)
    assert not isinstance(problem, ValueError), problem


def frames(session: Session, kind: str, parent: str, content: object) -> list[bytes]:
    """A message as a kernel sends it."""
    header = json.dumps({"msg_type": kind}).encode()
    reference = json.dumps({"msg_id": parent}).encode()
    return [b"<IDS|MSG>", b"", header, reference, b"{}", json.dumps(content).encode()]


@pytest.mark.parametrize(
    "content",
    [[1], {"execution_count": "x"}, {"data": 5}, b"["],
    ids=["list", "count", "data", "nesting"],
)
async def test_a_message_that_cannot_be_handled_is_reported_and_the_next_one_is_read(
    runtime: Path, sockets: zmq.asyncio.Context, content: object
) -> None:
    python = kernel(runtime, "true", functools.partial(JupyterKernel, sockets))
    queue, session = EventQueue(1 << 20), Session("")
    python._run = PendingRun("r1", queue)
    kind = "execute_input" if content == {"execution_count": "x"} else "display_data"
    bad = frames(session, kind, "r1", [] if isinstance(content, bytes) else content)
    if isinstance(content, bytes):
        bad[-1] = content * 200_000
    python._handle(bad, python._take_published)
    python._handle(
        frames(session, "status", "r1", {"execution_state": "idle"}), python._take_published
    )
    failure = await queue.get()
    assert isinstance(failure, Failure)
    assert failure.name == "MalformedMessage"
    assert python._run.ended.is_set()
