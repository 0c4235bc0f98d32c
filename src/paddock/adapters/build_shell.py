"""Runs commands of template builds in real sandboxes, and copies files into them, through envd."""

import asyncio
import base64
import os
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import IO, Any

import aiohttp
import msgspec
from msgspec import Struct

from paddock.adapters.envd_session import open_session
from paddock.controllers.template_build.ports import (
    BuildCommand,
    CommandRefusedError,
    CopyFiles,
    OnOutput,
)
from paddock.kit.errors import DeadlineExceededError, UnavailableError
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.tokens import TokenSeed
from paddock.runtime import envd_api

MAKE_DIRECTORY_PATH = "/filesystem.Filesystem/MakeDir"
COPY_PATH = "/files/copy"
COPY_SECONDS = 3600.0
_CHUNK = 1 << 20


class _Data(Struct, frozen=True):
    stdout: bytes = b""
    stderr: bytes = b""


class _End(Struct, frozen=True, rename="camel"):
    exit_code: int = 0
    status: str = ""


class _Event(Struct, frozen=True):
    data: _Data | None = None
    end: _End | None = None


class _Problem(Struct, frozen=True):
    code: str = ""
    message: str = ""


class _Message(Struct, frozen=True):
    event: _Event = _Event()
    error: _Problem | None = None


class EnvdBuildShell:
    """Calls the envd of the sandbox of each build."""

    def __init__(self, seed: TokenSeed) -> None:
        self._seed = seed

    async def run(self, sandbox: Sandbox, command: BuildCommand, on_output: OnOutput) -> int:
        """Run a command and return its exit status."""
        message = envd_api.shell_command(command.text, env=dict(command.env), cwd=command.workdir)
        headers = {**envd_api.STREAM_HEADERS, **_user(command.user)}
        try:
            async with (
                asyncio.timeout(command.seconds),
                self._session(sandbox, headers) as (session, base),
                session.post(
                    f"{base}{envd_api.START_PATH}", data=envd_api.frame(message)
                ) as response,
            ):
                if response.status != 200:
                    raise await _refused(sandbox, envd_api.START_PATH, response)
                async for event in _messages(response):
                    if event.error is not None:
                        raise _refusal(sandbox, event.error)
                    if event.event.data is not None:
                        await _deliver(event.event.data, on_output)
                    if event.event.end is not None:
                        return event.event.end.exit_code
        except TimeoutError as error:
            raise DeadlineExceededError(
                f"the command ran longer than {command.seconds:g} s"
            ) from error
        raise UnavailableError(f"envd of sandbox {sandbox.key} ended the stream of a command early")

    async def copy(self, sandbox: Sandbox, files: CopyFiles) -> None:
        """Copy files of an archive."""
        query = {
            "source": files.source,
            "path": files.destination,
            "owner": files.owner,
            "mode": files.mode,
            "username": files.user,
            "cwd": files.workdir or "",
        }
        with _opened(files) as archive:
            headers = {"Content-Length": str(os.fstat(archive.fileno()).st_size)}
            async with (
                self._session(sandbox, headers, seconds=COPY_SECONDS) as (session, base),
                session.post(
                    f"{base}{COPY_PATH}", params=query, data=_content(archive)
                ) as response,
            ):
                if response.status == 200:
                    return
                raise await _refused(sandbox, COPY_PATH, response)

    async def make_directory(self, sandbox: Sandbox, path: str, *, user: str) -> None:
        """Create a directory and its parents unless they exist."""
        headers = {**envd_api.CONNECT_HEADERS, **_user(user)}
        async with (
            self._session(sandbox, headers) as (session, base),
            session.post(f"{base}{MAKE_DIRECTORY_PATH}", json={"path": path}) as response,
        ):
            # An existing directory stays as it is.
            if response.status in (200, 409):
                return
            raise await _refused(sandbox, MAKE_DIRECTORY_PATH, response)

    @asynccontextmanager
    async def _session(
        self, sandbox: Sandbox, headers: dict[str, str], *, seconds: float | None = None
    ) -> AsyncGenerator[tuple[aiohttp.ClientSession, str]]:
        address, claim = sandbox.status.address.envd, sandbox.spec.claim
        if not address or claim is None:
            raise UnavailableError(f"sandbox {sandbox.key} has no address")
        token = self._seed.access_token(claim.sandbox_id, claim.access_token_hash)
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=30)
        try:
            async with open_session(
                address, headers={**headers, "X-Access-Token": token}, timeout=timeout
            ) as opened:
                yield opened
        except (aiohttp.ClientError, OSError) as error:
            # A timeout of a socket is an error of the client too; that of a request is not.
            is_total = isinstance(error, TimeoutError) and not isinstance(
                error, aiohttp.ClientError
            )
            if is_total and seconds is not None:
                raise DeadlineExceededError(
                    f"a request to envd of sandbox {sandbox.key} took longer than {seconds:g} s"
                ) from error
            raise UnavailableError(
                f"envd of sandbox {sandbox.key} does not answer: {error}"
            ) from error
        except msgspec.DecodeError as error:
            raise UnavailableError(
                f"envd of sandbox {sandbox.key} sent a response that cannot be decoded"
            ) from error


def _user(name: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"{name}:".encode()).decode()}


async def _deliver(data: _Data, on_output: OnOutput) -> None:
    if data.stdout:
        await on_output("stdout", data.stdout)
    if data.stderr:
        await on_output("stderr", data.stderr)


async def _messages(response: aiohttp.ClientResponse) -> AsyncIterator[_Message]:
    """Yield the messages of a Connect stream."""
    while True:
        try:
            head = await response.content.readexactly(envd_api.FRAME_HEAD.size)
        except asyncio.IncompleteReadError:
            return
        _, size = envd_api.FRAME_HEAD.unpack(head)
        try:
            payload = await response.content.readexactly(size)
        except asyncio.IncompleteReadError:
            return
        yield msgspec.json.decode(payload or b"{}", type=_Message)


def _opened(files: CopyFiles) -> IO[bytes]:
    """Open the archive: once, so that its size is that of what is sent."""
    try:
        return files.archive.open("rb")
    except FileNotFoundError as error:
        raise CommandRefusedError(
            f"the uploaded files of {files.source} were removed; upload them again"
        ) from error


async def _content(file: IO[bytes]) -> AsyncIterator[bytes]:
    while piece := await asyncio.to_thread(file.read, _CHUNK):
        yield piece


async def _refused(sandbox: Sandbox, path: str, response: aiohttp.ClientResponse) -> Exception:
    body = await response.read()
    if response.status in (400, 401, 404, 413):
        known: Any = msgspec.json.decode(body, type=dict[str, Any])
        message = str(known.get("message", ""))
        return CommandRefusedError(message, is_unknown_user="invalid username" in message)
    return envd_api.refusal(str(sandbox.key), path, response.status, body)


def _refusal(sandbox: Sandbox, problem: _Problem) -> Exception:
    if problem.code in ("unavailable", "internal", "canceled"):
        return UnavailableError(f"envd of sandbox {sandbox.key}: {problem.message}")
    return CommandRefusedError(problem.message, is_unknown_user=problem.code == "unauthenticated")
