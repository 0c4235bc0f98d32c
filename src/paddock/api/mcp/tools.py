"""The tools that run code and commands, and use files and ports."""

import base64
import binascii
from typing import Annotated, Any, Literal

from mcp.server.mcpserver import MCPServer
from mcp_types import CallToolResult
from pydantic import Field

from paddock.api.mcp import results
from paddock.api.mcp.tool_types import (
    READS,
    REPLACES,
    RUNS,
    Ctx,
    FindSession,
    SandboxId,
    reported,
)
from paddock.client.model import CodeOutcome, CodeRun, Interrupted, ShellCommand
from paddock.client.output import OutputTail
from paddock.kit.errors import InvalidError

MAX_READ_BYTES = 256 * 1024
MAX_IMAGE_FILE_BYTES = 3 << 20
MAX_ENTRIES = 500
_RUN_SECONDS = 120.0

RunSeconds = Annotated[float, Field(gt=0, le=3600, description="Stop it after this many seconds.")]
FilePath = Annotated[
    str, Field(description="A path in the sandbox; a relative one is below the home directory.")
]


class SandboxTools:
    """The tools that use a sandbox."""

    def __init__(self, find_session: FindSession) -> None:
        self._session = find_session

    async def run_code(
        self,
        ctx: Ctx,
        code: Annotated[str, Field(description="The code. The last expression is a result.")],
        language: Annotated[
            str, Field(description="python, javascript, typescript, bash, r or java")
        ] = "python",
        sandbox_id: SandboxId = None,
        timeout_seconds: RunSeconds = _RUN_SECONDS,
    ) -> Annotated[CallToolResult, results.CodeDone]:
        """Run code in an interpreter that keeps its variables between calls.

        Returns output, results, charts and images, and the traceback of an exception. Python has
        numpy, pandas and matplotlib.
        """
        session = self._session(ctx)
        box = await session.open(sandbox_id, seconds=timeout_seconds)
        outcome, out, err = CodeOutcome(), OutputTail(), OutputTail()
        stopped = ""
        run = CodeRun(code=code, language=language, seconds=timeout_seconds)
        try:
            with session.slot():
                await session.calls.run_code(box, run, outcome, out, err)
        except Interrupted as reason:
            stopped = str(reason)
        return results.code_result(box.sandbox_id, outcome, out, err, stopped)

    async def run_command(
        self,
        ctx: Ctx,
        command: Annotated[str, Field(description="A command line for bash.")],
        cwd: Annotated[str | None, Field(description="The directory to run it in.")] = None,
        env: Annotated[
            dict[str, str] | None, Field(description="Environment variables to set.")
        ] = None,
        sandbox_id: SandboxId = None,
        timeout_seconds: RunSeconds = _RUN_SECONDS,
    ) -> Annotated[CallToolResult, results.CommandDone]:
        """Run a shell command and wait for its end.

        Returns exit code, standard output and standard error. To start a server, run it in the
        background with its output redirected: `nohup COMMAND >log 2>&1 &`.
        """
        session = self._session(ctx)
        box = await session.open(sandbox_id, seconds=timeout_seconds)
        out, err = OutputTail(), OutputTail()
        wanted = ShellCommand(text=command, seconds=timeout_seconds, cwd=cwd, env=env or {})
        code: int | None = None
        stopped = ""
        try:
            with session.slot():
                code = await session.calls.run_command(box, wanted, out, err)
        except Interrupted as reason:
            stopped = str(reason)
        return results.command_result(
            results.CommandDone(
                sandbox_id=box.sandbox_id,
                exit_code=code,
                stdout=out.text,
                stderr=err.text,
                stopped=stopped,
            )
        )

    async def read_file(
        self,
        ctx: Ctx,
        path: FilePath,
        offset: Annotated[int, Field(ge=0, description="The first byte to read.")] = 0,
        sandbox_id: SandboxId = None,
    ) -> Annotated[CallToolResult, results.FileRead]:
        """Read a file: text, a PNG or JPEG image, or other bytes in base64.

        At most 256 KiB are returned; read on from an offset. Images are returned whole.
        """
        session = self._session(ctx)
        box = await session.open(sandbox_id)
        with session.slot():
            part = await session.calls.read_file(
                box, path, offset=offset, limit=MAX_IMAGE_FILE_BYTES
            )
        data = part.data
        is_image = results.image_type(data) is not None and part.size == len(data)
        if is_image:
            encoding, content = "image", base64.b64encode(data).decode()
        else:
            data = data[:MAX_READ_BYTES]
            encoding, content, data = _decoded(data)
        read = results.FileRead(
            sandbox_id=box.sandbox_id,
            path=path,
            size=part.size,
            offset=offset,
            bytes_read=len(data),
            encoding=encoding,
            content=content,
        )
        return results.file_result(read, part)

    async def write_file(
        self,
        ctx: Ctx,
        path: FilePath,
        content: str,
        encoding: Annotated[
            Literal["utf-8", "base64"], Field(description="How the content is encoded.")
        ] = "utf-8",
        sandbox_id: SandboxId = None,
    ) -> results.FileWritten:
        """Write a file, and create its directories. A file that exists is replaced."""
        try:
            data = (
                base64.b64decode(content, validate=True)
                if encoding == "base64"
                else content.encode()
            )
        except (binascii.Error, ValueError) as error:
            raise InvalidError.at("content", f"is not {encoding}: {error}") from error
        session = self._session(ctx)
        box = await session.open(sandbox_id)
        await session.calls.write_file(box, path, data)
        return results.FileWritten(sandbox_id=box.sandbox_id, path=path, size=len(data))

    async def list_files(
        self,
        ctx: Ctx,
        path: FilePath = ".",
        depth: Annotated[int, Field(ge=1, le=10, description="Levels of directories.")] = 1,
        sandbox_id: SandboxId = None,
    ) -> results.FileList:
        """List a directory, up to 500 entries."""
        session = self._session(ctx)
        box = await session.open(sandbox_id)
        with session.slot():
            found = await session.calls.list_files(box, path, depth=depth)
        return results.FileList(
            sandbox_id=box.sandbox_id,
            entries=[
                results.EntryShown(path=item.path, kind=item.kind, size=item.size)
                for item in found[:MAX_ENTRIES]
            ],
            omitted=max(len(found) - MAX_ENTRIES, 0),
        )

    async def get_url(
        self,
        ctx: Ctx,
        port: Annotated[int, Field(ge=1, le=65535, description="A TCP port of the sandbox.")],
        sandbox_id: SandboxId = None,
    ) -> results.PortUrl:
        """Return the URL at which a server in the sandbox is reached. A request resumes it."""
        session = self._session(ctx)
        box = await session.open(sandbox_id)
        token = box.traffic_token
        return results.PortUrl(
            sandbox_id=box.sandbox_id,
            url=session.calls.url(box, port),
            headers={"e2b-traffic-access-token": token} if token else {},
        )

    def register(self, server: MCPServer[Any]) -> None:
        """Add the tools to a server."""
        server.add_tool(reported(self.run_code), annotations=RUNS)
        server.add_tool(reported(self.run_command), annotations=RUNS)
        server.add_tool(reported(self.read_file), annotations=READS)
        server.add_tool(reported(self.write_file), annotations=REPLACES)
        server.add_tool(reported(self.list_files), annotations=READS)
        server.add_tool(reported(self.get_url), annotations=READS)


def _decoded(data: bytes) -> tuple[str, str, bytes]:
    """Return encoding, content and the bytes that are returned: a character is not cut."""
    for cut in range(4):
        part = data[: len(data) - cut]
        try:
            return "utf-8", part.decode(), part
        except UnicodeDecodeError as error:
            if error.end < len(part):
                break
    return "base64", base64.b64encode(data).decode(), data
