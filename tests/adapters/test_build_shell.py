"""Timeouts of calls to envd during builds: a machine that fails, or a request that takes long."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import aiohttp
import pytest

from paddock.adapters import build_shell
from paddock.adapters.build_shell import EnvdBuildShell
from paddock.controllers.template_build.ports import BuildCommand, CommandRefusedError, CopyFiles
from paddock.kit.errors import DeadlineExceededError, UnavailableError
from paddock.resources.kinds.sandbox import (
    ClaimIdentity,
    Sandbox,
    SandboxAddress,
    SandboxSpec,
    SandboxStatus,
)
from paddock.resources.meta import ObjectMeta
from paddock.resources.tokens import TokenSeed


def sandbox(address: str) -> Sandbox:
    claim = ClaimIdentity(
        sandbox_id="a", owner="red", lock="x", claim_time=datetime(2030, 1, 1, tzinfo=UTC)
    )
    return Sandbox(
        metadata=ObjectMeta(name="built", namespace="red"),
        spec=SandboxSpec(claim=claim),
        status=SandboxStatus(address=SandboxAddress(envd=address)),
    )


@asynccontextmanager
async def silent_envd(path: Path) -> AsyncGenerator[Sandbox]:
    """Accept connections and never answer."""

    gone = asyncio.Event()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        await writer.wait_closed()
        gone.set()

    server = await asyncio.start_unix_server(listen, path=path)
    try:
        yield sandbox(f"unix:{path}")
        await gone.wait()
    finally:
        server.close()


def ignore(_stream: str, _data: bytes) -> None:
    """Output is not of interest."""


async def test_a_connection_that_times_out_is_a_failure_of_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @asynccontextmanager
    async def session(*_args: object, **_options: object) -> AsyncGenerator[None]:
        raise aiohttp.ConnectionTimeoutError("Connection timeout to host http://envd")
        yield

    monkeypatch.setattr(build_shell, "open_session", session)
    command = BuildCommand(text="true", user="root")
    with pytest.raises(UnavailableError, match="does not answer: Connection timeout"):
        await EnvdBuildShell(TokenSeed(b"x")).run(sandbox("http://envd"), command, ignore)


async def test_a_command_that_does_not_end_exceeds_its_own_time(tmp_path: Path) -> None:
    async with silent_envd(tmp_path / "envd") as box:
        command = BuildCommand(text="sleep 9", user="root", seconds=0.5)
        with pytest.raises(DeadlineExceededError, match=r"ran longer than 0\.5 s"):
            await EnvdBuildShell(TokenSeed(b"x")).run(box, command, ignore)


async def test_a_copy_that_does_not_end_exceeds_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_shell, "COPY_SECONDS", 0.5)
    archive = tmp_path / "archive"
    archive.write_bytes(b"x")
    files = CopyFiles(archive=archive, source="a", destination="b", owner="", mode="", user="root")
    async with silent_envd(tmp_path / "envd") as box:
        with pytest.raises(DeadlineExceededError, match=r"took longer than 0\.5 s"):
            await EnvdBuildShell(TokenSeed(b"x")).copy(box, files)


async def test_files_that_were_removed_are_a_reason_in_the_build(tmp_path: Path) -> None:
    files = CopyFiles(
        archive=tmp_path / "removed.tar", source="app", destination="/app", owner="", mode="",
        user="user",
    )  # fmt: skip
    with pytest.raises(CommandRefusedError, match="files of app were removed; upload them again"):
        await EnvdBuildShell(TokenSeed(b"x")).copy(Sandbox(), files)
