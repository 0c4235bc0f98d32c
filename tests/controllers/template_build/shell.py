"""A shell for builds on the simulated runtime: commands are scripted."""

import asyncio
from collections.abc import Callable, Mapping

from msgspec import Struct

from paddock.controllers.template_build.ports import BuildCommand, CopyFiles, OnOutput
from paddock.resources.kinds.sandbox import Sandbox


class Reply(Struct, frozen=True):
    """What a command does."""

    status: int = 0
    stdout: bytes = b""
    stderr: bytes = b""
    seconds: float = 0.0
    error: Exception | None = None


class FakeShell:
    """Records commands; `replies` says what those with this text do, by default nothing."""

    def __init__(self) -> None:
        self.replies: dict[str, list[Reply]] = {}
        self.commands: list[BuildCommand] = []
        self.sandboxes: list[str] = []
        self.on_command: Callable[[str], None] = lambda _: None

    @property
    def texts(self) -> list[str]:
        """The texts of all commands."""
        return [command.text for command in self.commands]

    def script(self, replies: Mapping[str, Reply]) -> None:
        """Set the next replies."""
        for text, reply in replies.items():
            self.replies.setdefault(text, []).append(reply)

    async def run(self, sandbox: Sandbox, command: BuildCommand, on_output: OnOutput) -> int:
        self.commands.append(command)
        self.sandboxes.append(sandbox.metadata.name)
        self.on_command(command.text)
        waiting = self.replies.get(command.text)
        reply = waiting.pop(0) if waiting else Reply()
        await asyncio.sleep(reply.seconds)
        if reply.error is not None:
            raise reply.error
        if reply.stdout:
            await on_output("stdout", reply.stdout)
        if reply.stderr:
            await on_output("stderr", reply.stderr)
        return reply.status

    async def copy(self, sandbox: Sandbox, files: CopyFiles) -> None:
        self.commands.append(BuildCommand(text=f"copy {files.source}", user=files.user))

    async def make_directory(self, sandbox: Sandbox, path: str, *, user: str) -> None:
        self.commands.append(BuildCommand(text=f"mkdir {path}", user=user))
