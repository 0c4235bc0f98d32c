"""Commands and files of a sandbox, through the gateway and envd."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

import aiohttp
import msgspec
from msgspec import Struct

from paddock.client.calls import HttpCalls
from paddock.client.model import FilePart, FoundEntry, Interrupted, OpenSandbox, ShellCommand
from paddock.client.output import OutputTail
from paddock.kit.errors import (
    InvalidError,
    NotFoundError,
    PaddockError,
    TooLargeError,
    UnavailableError,
)
from paddock.kit.logs import fields
from paddock.runtime import envd_api

log = logging.getLogger(__name__)

ENVD_PORT = 49983
MAX_OUTPUT_BYTES = 64 << 20
"""A command or code with more output than that is stopped."""
MAX_FRAME_BYTES = 16 << 20
_PARTIAL, _NO_SUCH_RANGE = 206, 416
_MAX_MESSAGE_BYTES = 4096
_MAX_LISTED = 50_000
_END_MARGIN_SECONDS = 10.0
"""envd ends a command at its deadline; after this much more it is given up."""
_KILL_SECONDS = 5.0
_LIST_PATH = "/filesystem.Filesystem/ListDir"
_KINDS = {"FILE_TYPE_DIRECTORY": "directory", "FILE_TYPE_FILE": "file"}
_GONE = "the sandbox ended or was paused while the command ran"


class _Start(Struct, frozen=True):
    pid: int = 0


class _Data(Struct, frozen=True):
    stdout: bytes = b""
    stderr: bytes = b""


class _End(Struct, frozen=True, rename="camel"):
    exit_code: int = 0


class _Event(Struct, frozen=True):
    start: _Start | None = None
    data: _Data | None = None
    end: _End | None = None


class _Problem(Struct, frozen=True):
    code: str = ""
    message: str = ""


class _Frame(Struct, frozen=True):
    event: _Event = _Event()
    error: _Problem | None = None


class _Entry(Struct, frozen=True, rename="camel"):
    path: str = ""
    type: str = ""
    size: int | str = 0
    symlink_target: str | None = None


class _Listing(Struct, frozen=True):
    entries: tuple[_Entry, ...] = ()


def sandbox_headers(box: OpenSandbox, port: int) -> dict[str, str]:
    """Return the headers that route a request to a port of a sandbox."""
    headers = {"E2b-Sandbox-Id": box.sandbox_id, "E2b-Sandbox-Port": str(port)}
    if box.access_token:
        headers["X-Access-Token"] = box.access_token
    if box.traffic_token:
        headers["E2b-Traffic-Access-Token"] = box.traffic_token
    return headers


class EnvdCalls:
    """Calls to the envd of sandboxes."""

    def __init__(self, session: aiohttp.ClientSession, gateway: str) -> None:
        self._session = session
        self._gateway = gateway

    def _calls(self, box: OpenSandbox) -> HttpCalls:
        return HttpCalls(self._session, self._gateway, sandbox_headers(box, ENVD_PORT))

    async def run(
        self, box: OpenSandbox, command: ShellCommand, out: OutputTail, err: OutputTail
    ) -> int:
        """Run a command line and return its exit code.

        `Interrupted` if it ran too long or printed too much. It is killed then, and if the caller
        is cancelled.
        """
        pid = 0
        is_over = False
        try:
            async with aclosing(self._events(box, command)) as events:
                async for event in events:
                    if event.start is not None:
                        pid = event.start.pid
                    if event.data is not None:
                        out.add(event.data.stdout)
                        err.add(event.data.stderr)
                        if out.received + err.received > MAX_OUTPUT_BYTES:
                            raise Interrupted(
                                f"stopped after {MAX_OUTPUT_BYTES >> 20} MiB of output; "
                                "write large output to a file"
                            )
                    if event.end is not None:
                        is_over = True
                        return event.end.exit_code
        finally:
            if pid and not is_over:
                await asyncio.shield(self._kill(box, pid))
        raise UnavailableError(_GONE)

    async def _events(self, box: OpenSandbox, command: ShellCommand) -> AsyncGenerator[_Event]:
        message = envd_api.shell_command(command.text, env=command.env, cwd=command.cwd)
        headers = {
            **envd_api.STREAM_HEADERS,
            "Connect-Timeout-Ms": str(max(int(command.seconds * 1000), 1)),
        }
        async with self._calls(box).open(
            "POST",
            envd_api.START_PATH,
            data=envd_api.frame(message),
            headers=headers,
            seconds=command.seconds + _END_MARGIN_SECONDS,
        ) as response:
            while (frame := await _next_frame(response)) is not None:
                if frame.error is not None:
                    raise _problem(frame.error, command)
                yield frame.event

    async def _kill(self, box: OpenSandbox, pid: int) -> None:
        """Kill the process group of a command: envd signals only one process."""
        wanted = ShellCommand(text=f"kill -KILL -- -{pid}", seconds=_KILL_SECONDS)
        try:
            async with (
                asyncio.timeout(_KILL_SECONDS),
                aclosing(self._events(box, wanted)) as events,
            ):
                async for _ in events:
                    pass
        except (PaddockError, Interrupted, TimeoutError) as error:
            # The deadline that envd knows ends it later.
            log.info("command was not killed", extra=fields(error=str(error)))

    async def read_file(self, box: OpenSandbox, path: str, *, offset: int, limit: int) -> FilePart:
        """Return up to `limit` bytes of a file; none behind its end."""
        headers = {"Range": f"bytes={offset}-{offset + limit - 1}", "Accept-Encoding": "identity"}
        async with self._calls(box).open(
            "GET", "/files", params={"path": path}, headers=headers, accepted=(_NO_SUCH_RANGE,)
        ) as response:
            whole = response.headers.get("Content-Range", "").rpartition("/")[2]
            size = int(whole) if whole.isdecimal() else 0
            if response.status == _NO_SUCH_RANGE:
                return FilePart(b"", size)
            data = bytearray()
            # A file of size 0, such as most of /proc, is sent from its beginning.
            position = offset if response.status == _PARTIAL else 0
            async for chunk in response.content.iter_any():
                data += chunk[max(offset - position, 0) :]
                position += len(chunk)
                if len(data) >= limit:
                    break
        return FilePart(bytes(data[:limit]), size or position)

    async def write_file(self, box: OpenSandbox, path: str, data: bytes) -> None:
        """Write a file; its directories are created."""
        headers = {"Content-Type": "application/octet-stream"}
        async with self._calls(box).open(
            "POST", "/files", data=data, params={"path": path}, headers=headers
        ) as response:
            # Not the whole of it: the sandbox may send a response without end.
            await response.content.read(_MAX_MESSAGE_BYTES)

    async def list_files(self, box: OpenSandbox, path: str, *, depth: int) -> list[FoundEntry]:
        """Return the entries of a directory. `InvalidError` if there are too many."""
        calls = self._calls(box)
        asked = {"path": path, "depth": depth}
        try:
            data = await calls.read(
                "POST", _LIST_PATH, asked, headers=dict(envd_api.CONNECT_HEADERS)
            )
        except TooLargeError as error:
            raise _large_listing(path) from error
        # Each entry is an object: a short one takes much more memory than its text.
        if data.count(b"{") > _MAX_LISTED:
            raise _large_listing(path)
        listing = calls.decode(data, _Listing)
        return [
            FoundEntry(
                entry.path,
                "symlink" if entry.symlink_target else _KINDS.get(entry.type, "file"),
                int(entry.size),
            )
            for entry in listing.entries
        ]


def _large_listing(path: str) -> InvalidError:
    return InvalidError.at(
        "path", f"{path} has too many entries to list", hint="list a smaller part, or a lower depth"
    )


async def _next_frame(response: aiohttp.ClientResponse) -> _Frame | None:
    """Return the next message of a Connect stream, or None at its end."""
    try:
        head = await response.content.readexactly(envd_api.FRAME_HEAD.size)
        flags, size = envd_api.FRAME_HEAD.unpack(head)
        if size > MAX_FRAME_BYTES:
            raise UnavailableError(f"the sandbox sent a message of {size} bytes")
        frame = msgspec.json.decode(await response.content.readexactly(size), type=_Frame)
    except (asyncio.IncompleteReadError, msgspec.DecodeError) as error:
        raise UnavailableError(_GONE) from error
    if flags & envd_api.END_STREAM and frame.error is None:
        return None
    return frame


def _problem(problem: _Problem, command: ShellCommand) -> Exception:
    message = problem.message[:_MAX_MESSAGE_BYTES]
    if problem.code == "deadline_exceeded":
        return Interrupted(f"killed after {command.seconds:g} s; raise timeout_seconds")
    if problem.code == "not_found":
        return NotFoundError(message)
    if problem.code in ("invalid_argument", "unauthenticated", "permission_denied"):
        return InvalidError(message)
    return UnavailableError(message or problem.code[:_MAX_MESSAGE_BYTES])
