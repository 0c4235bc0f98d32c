"""What a step runs in: the sandbox, the shell, the log, and the context before it."""

from collections.abc import Awaitable, Callable

from msgspec import Struct

from paddock.builds.logs import BuildLogs
from paddock.controllers.template_build.keys import StepContext
from paddock.controllers.template_build.output import OutputLines, OutputPace
from paddock.controllers.template_build.ports import (
    BuildCommand,
    BuildShell,
    CommandRefusedError,
)
from paddock.kit.errors import (
    ConflictError,
    DeadlineExceededError,
    PaddockError,
    RateLimitedError,
    UnavailableError,
)
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.kinds.template_build import BuildStep, TemplateBuild

TRANSIENT = (UnavailableError, ConflictError, RateLimitedError)
"""Failures of the machine: a build begins again at its last layer."""
STEP_SECONDS = 3600.0
ROOT = "root"
TakeOutput = Callable[[str, bytes], None]
"""Gets the stream, `stdout` or `stderr`, and a piece of output."""


class StepFailedError(PaddockError):
    """A build cannot succeed; the message is its reason."""

    def __init__(self, message: str, *, step: str = "") -> None:
        super().__init__(message)
        self.step = step


class StepRunner(Struct, frozen=True, kw_only=True):
    """Runs one step. `sandbox` acquires the sandbox of the build on first use."""

    build: TemplateBuild
    step: BuildStep
    number: str
    prefix: str
    context: StepContext
    sandbox: Callable[[], Awaitable[Sandbox]]
    shell: BuildShell
    logs: BuildLogs

    def log(self, message: str, level: str = "info") -> None:
        """Append to the log of the build."""
        self.logs.append(self.build.metadata.uid, message, level=level, step=self.number)

    async def run(self, text: str, *, user: str, seconds: float = STEP_SECONDS) -> int:
        """Run a command line with its output in the log, and return its exit status."""
        lines = OutputLines(self.prefix, self.log)
        try:
            return await self.run_with(text, lines.feed, user=user, seconds=seconds)
        finally:
            lines.end()

    async def run_with(
        self, text: str, take: TakeOutput, *, user: str, seconds: float = STEP_SECONDS
    ) -> int:
        """Run a command line and return its exit status; `StepFailedError`."""
        pace = OutputPace(lambda message: self.log(message, "warn"))

        async def on_output(stream: str, data: bytes) -> None:
            take(stream, data)
            await pace.take(len(data))

        command = BuildCommand(
            text=text,
            user=user,
            env=self.context.variables,
            workdir=self.context.workdir,
            seconds=seconds,
        )
        try:
            return await self.shell.run(await self.sandbox(), command, on_output)
        except CommandRefusedError as error:
            reason = error.message
            if error.is_unknown_user:
                reason = f"unauthenticated: invalid username: '{user}'"
            raise StepFailedError(
                f"failed to run command '{text}': command failed: {reason}"
            ) from error
        except DeadlineExceededError as error:
            raise StepFailedError(
                f"failed to run command '{text}': it ran longer than {seconds:g} s"
            ) from error

    async def require(self, text: str, *, user: str) -> None:
        """Run a command line; raise `StepFailedError` unless it exits with 0."""
        status = await self.run(text, user=user)
        if status:
            raise StepFailedError(f"failed to run command '{text}': exit status {status}")
