"""The start command of a template and the wait until it is ready."""

import asyncio

from paddock.controllers.template_build.steps.runner import StepFailedError, StepRunner
from paddock.kit.errors import PaddockError
from paddock.kit.tasks import cancel_and_wait
from paddock.resources.kinds.template_build import REASON_FINALIZE

READY_SECONDS = 600.0
READY_PERIOD_SECONDS = 2.0
DEFAULT_READY_COMMAND = "sleep 20"
"""Where there is a start command and no ready command."""


async def start_and_wait(runner: StepRunner, *, start: str, ready: str) -> None:
    """Run the start command and return once the ready command exits with 0.

    The start command keeps running. `StepFailedError` if it fails before.
    """
    ready = ready or (DEFAULT_READY_COMMAND if start else "")
    if start:
        runner.log(f"Running start command: {start}")
    started = asyncio.create_task(_start(runner, start), name="start command") if start else None
    try:
        if ready:
            await _until_ready(runner, ready, started)
    finally:
        if started is not None and not started.done():
            # Ends only the stream of its output.
            await cancel_and_wait(started)
    if started is not None and not started.cancelled() and started.done():
        _check(started, start)


async def _start(runner: StepRunner, command: str) -> int:
    return await runner.run(command, user=runner.context.user)


async def _until_ready(
    runner: StepRunner, command: str, started: "asyncio.Task[int] | None"
) -> None:
    runner.log(f"Waiting for template to be ready: {command}")
    waiting = asyncio.create_task(_poll(runner, command), name="ready command")
    try:
        async with asyncio.timeout(READY_SECONDS):
            if started is not None:
                await asyncio.wait((started, waiting), return_when=asyncio.FIRST_COMPLETED)
                if not waiting.done():
                    _check(started, "")
            await waiting
    except TimeoutError as error:
        raise StepFailedError(
            f"the ready command {command!r} did not exit with 0 within {READY_SECONDS:g} s",
            step=REASON_FINALIZE,
        ) from error
    finally:
        if not waiting.done():
            await cancel_and_wait(waiting)
    runner.log("Template is ready")


async def _poll(runner: StepRunner, command: str) -> None:
    def ignore(_stream: str, _data: bytes) -> None:
        """Output of the ready command says nothing while it fails."""

    user = runner.context.user
    while True:
        if await runner.run_with(command, ignore, user=user, seconds=READY_SECONDS) == 0:
            return
        await asyncio.sleep(READY_PERIOD_SECONDS)


def _check(started: "asyncio.Task[int]", command: str) -> None:
    """Raise if the start command has failed. One that exits with 0 left its work to others."""
    try:
        status = started.result()
    except PaddockError as error:
        raise StepFailedError(error.message, step=REASON_FINALIZE) from error
    if status:
        raise StepFailedError(
            f"the start command{' ' + repr(command) if command else ''} failed: "
            f"exit status {status}",
            step=REASON_FINALIZE,
        )
