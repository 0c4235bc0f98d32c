"""Probes of idle sandboxes against a real envd: its health, and commands that it runs."""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from paddock.adapters.prober import probe_envd
from paddock.envd.process.direct_spawner import DirectSpawner
from paddock.resources.kinds.sandbox import Sandbox, SandboxAddress, SandboxStatus
from paddock.resources.kinds.template import Probe
from paddock.resources.meta import ObjectMeta
from tests.envd.rig import Rig, open_rig


@pytest.fixture
async def envd() -> AsyncIterator[Rig]:
    directory = Path(tempfile.mkdtemp(prefix="paddock-probe-"))
    directory.chmod(0o755)
    opened = await open_rig(directory, spawner=DirectSpawner())
    yield opened
    opened.envd.close()
    await asyncio.sleep(0)
    shutil.rmtree(directory)


def sandbox(address: str | None) -> Sandbox:
    return Sandbox(
        metadata=ObjectMeta(name="idle", namespace="default"),
        status=SandboxStatus(address=SandboxAddress(envd=address)),
    )


def at(rig: Rig) -> Sandbox:
    return sandbox(f"unix:{rig.socket_path}")


async def test_an_envd_that_answers_is_healthy(envd: Rig) -> None:
    assert await probe_envd(at(envd), Probe()) is None


async def test_a_failed_command_is_reported_with_its_exit_code(envd: Rig) -> None:
    mark = envd.home / "probed"
    assert await probe_envd(at(envd), Probe(command=f"echo yes > {mark}")) is None
    assert mark.read_text() == "yes\n"
    failed = await probe_envd(at(envd), Probe(command="exit 7"))
    assert failed == "the command exited with 7"


async def test_much_output_does_not_hide_the_exit_code(envd: Rig) -> None:
    noisy = Probe(command="head -c 300000 /dev/zero | tr '\\0' x; exit 3")
    assert await probe_envd(at(envd), noisy) == "the command exited with 3"


async def test_a_command_killed_by_a_signal_is_unhealthy(envd: Rig) -> None:
    assert await probe_envd(at(envd), Probe(command="kill -9 $$")) is not None


async def test_an_address_without_envd_is_unhealthy(envd: Rig) -> None:
    assert "does not answer" in str(await probe_envd(sandbox("unix:/nowhere/envd.sock"), Probe()))
    assert await probe_envd(sandbox(None), Probe()) == "it has no address"
    envd.envd.close()
    assert "does not answer" in str(await probe_envd(at(envd), Probe()))


async def test_a_malformed_response_is_unhealthy() -> None:
    async def malformed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = b"\0\0\0\0\x05[not]"
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        await writer.drain()
        writer.close()

    with tempfile.TemporaryDirectory() as directory:
        async with await asyncio.start_unix_server(malformed, f"{directory}/s"):
            problem = await probe_envd(sandbox(f"unix:{directory}/s"), Probe(command="true"))
    assert "cannot be decoded" in str(problem)
