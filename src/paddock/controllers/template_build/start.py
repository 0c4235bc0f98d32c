"""The start command of a template and the wait until it is ready."""

import asyncio
import re

from paddock.controllers.template_build.steps.runner import TRANSIENT, StepFailedError, StepRunner
from paddock.kit.errors import PaddockError
from paddock.kit.tasks import cancel_and_wait
from paddock.resources.kinds.template_build import REASON_FINALIZE

READY_SECONDS = 600.0
READY_PERIOD_SECONDS = 2.0
DEFAULT_READY_COMMAND = "sleep 20"
"""Where there is a start command and no ready command."""
_MISSING = re.compile(r"(?:^|[\s:])([\w.+-]+): (?:command )?not found\s*$", re.MULTILINE)
"""What bash, dash and BusyBox print for a program that an image lacks."""
_KEPT_CHARACTERS = 2000
_SHOWN_CHARACTERS = 200


class ReadyAttempts:
    """What attempts of a ready command print to stderr. Each missing program is warned of once."""

    def __init__(self, runner: StepRunner) -> None:
        self._runner = runner
        self._text = ""
        self._said = ""
        """What the last attempt that failed has printed."""
        self._warned: set[str] = set()

    def take(self, stream: str, data: bytes) -> None:
        """Keep the end of what one attempt prints."""
        if stream == "stderr":
            text = data.decode("utf-8", "replace")
            self._text = (self._text + text)[-_KEPT_CHARACTERS:]

    def begin(self) -> None:
        """Forget the output of the attempt before."""
        self._text = ""

    def fail(self) -> None:
        """Warn of programs that the attempt needed and the image does not have."""
        self._said = self._text
        for name in _MISSING.findall(self._text):
            if name in self._warned:
                continue
            self._warned.add(name)
            self._runner.log(
                f"The ready command needs {name!r}, which the image does not have: install it in a "
                "step, or use another ready command.",
                "warn",
            )

    @property
    def reason(self) -> str:
        """What the last attempt said, for the message of the failure."""
        lines = self._said.strip().splitlines()
        return f"; it said: {lines[-1][:_SHOWN_CHARACTERS]}" if lines else ""


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
    attempts = ReadyAttempts(runner)
    waiting = asyncio.create_task(_poll(runner, command, attempts), name="ready command")
    try:
        async with asyncio.timeout(READY_SECONDS):
            if started is not None:
                await asyncio.wait((started, waiting), return_when=asyncio.FIRST_COMPLETED)
                if not waiting.done():
                    _check(started, "")
            await waiting
    except TimeoutError as error:
        raise StepFailedError(
            f"the ready command {command!r} did not exit with 0 within {READY_SECONDS:g} s"
            f"{attempts.reason}",
            step=REASON_FINALIZE,
        ) from error
    finally:
        if not waiting.done():
            await cancel_and_wait(waiting)
    runner.log("Template is ready")


async def _poll(runner: StepRunner, command: str, attempts: ReadyAttempts) -> None:
    user = runner.context.user
    while True:
        attempts.begin()
        if await runner.run_with(command, attempts.take, user=user, seconds=READY_SECONDS) == 0:
            return
        attempts.fail()
        await asyncio.sleep(READY_PERIOD_SECONDS)


def _check(started: "asyncio.Task[int]", command: str) -> None:
    """Raise if the start command has failed. One that exits with 0 left its work to others."""
    try:
        status = started.result()
    except TRANSIENT:
        raise
    except PaddockError as error:
        raise StepFailedError(error.message, step=REASON_FINALIZE) from error
    if status:
        raise StepFailedError(
            f"the start command{' ' + repr(command) if command else ''} failed: "
            f"exit status {status}",
            step=REASON_FINALIZE,
        )
