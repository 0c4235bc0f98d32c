"""The official client of MCP, over stdio and over HTTP, on a real installation."""

import asyncio
import base64
import os
import signal
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

pytest.importorskip("mcp")

import httpx2
import msgspec
from mcp import Client
from mcp.client.stdio import StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp_types import CallToolResult, TextContent

from tests.installation import Installation
from tests.newcomer.blocks import blocks
from tests.runtime.local.nodes import eventually

pytestmark = [pytest.mark.sdk, pytest.mark.timeout(480)]

PADDOCK = [sys.executable, "-c", "from paddock.cli import main; main()", "mcp"]
STDIO = [*PADDOCK, "--template", "base"]


def environment(installation: Installation) -> dict[str, str]:
    return {
        **installation.environment,
        "PADDOCK_URL": installation.url,
        "E2B_API_KEY": installation.secrets.api_key,
    }


@asynccontextmanager
async def over_stdio(installation: Installation) -> AsyncGenerator[Client]:
    command, *arguments = STDIO
    parameters = StdioServerParameters(
        command=command, args=arguments, env=environment(installation)
    )
    async with Client(parameters) as client:
        yield client


@asynccontextmanager
async def over_http(installation: Installation) -> AsyncGenerator[Client]:
    headers = {"Authorization": f"Bearer {installation.secrets.api_key}"}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=60) as http,
        Client(streamable_http_client(f"{installation.url}/mcp", http_client=http)) as client,
    ):
        yield client


TRANSPORTS = pytest.mark.parametrize("connect", [over_stdio, over_http], ids=["stdio", "http"])


def structured(result: CallToolResult) -> dict[str, Any]:
    texts = [part.text for part in result.content if isinstance(part, TextContent)]
    assert not result.is_error, texts
    assert result.structured_content is not None
    return result.structured_content


async def run(client: Client, command: str, **arguments: Any) -> dict[str, Any]:
    return structured(await client.call_tool("run_command", {"command": command, **arguments}))


async def api(installation: Installation, method: str, path: str, body: Any = None) -> Any:
    headers = {"X-API-Key": installation.secrets.api_key}
    async with aiohttp.ClientSession(headers=headers) as http:
        answer = await http.request(method, installation.url + path, json=body)
        return await answer.json()


async def is_paused(installation: Installation, sandbox_id: str) -> bool:
    shown = await api(installation, "GET", f"/sandboxes/{sandbox_id}")
    return shown["state"] == "paused"


async def test_the_program_of_the_guide_runs(installation: Installation) -> None:
    [program] = [block.text for block in blocks("docs/how-to/mcp.md") if block.language == "python"]
    assert "http://localhost:3000" in program
    done = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        program.replace("http://localhost:3000", installation.url),
        env=environment(installation),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, problem = await done.communicate()
    assert done.returncode == 0, problem.decode()
    assert out.startswith(b"Linux "), out


@TRANSPORTS
async def test_a_session_uses_one_sandbox_which_pauses_at_its_end(
    installation: Installation, connect: Callable[[Installation], Any]
) -> None:
    async with connect(installation) as client:
        first = await run(client, "echo $((6 * 7)); echo oops >&2; exit 3")
        assert (first["stdout"], first["stderr"], first["exit_code"]) == ("42\n", "oops\n", 3)
        box = first["sandbox_id"]
        await client.call_tool("write_file", {"path": "notes/a.txt", "content": "grüße"})
        second = await run(client, "cat notes/a.txt")
        assert (second["sandbox_id"], second["stdout"]) == (box, "grüße")
        read = structured(await client.call_tool("read_file", {"path": "notes/a.txt"}))
        assert (read["content"], read["size"]) == ("grüße", 7)
        listed = structured(await client.call_tool("list_files", {"path": "notes"}))
        assert [item["path"] for item in listed["entries"]] == ["/home/user/notes/a.txt"]
        await run(client, "nohup python3 -m http.server 8000 >/dev/null 2>&1 &")
        await run(client, "until curl -sf localhost:8000; do sleep 0.1; done")
        shown = structured(await client.call_tool("get_url", {"port": 8000}))
        assert shown["url"].endswith("/")
        clones = structured(await client.call_tool("fork_sandbox", {}))["sandbox_ids"]
        cloned = await run(client, "cat notes/a.txt", sandbox_id=clones[0])
        assert cloned["stdout"] == "grüße"
        await client.call_tool("kill_sandbox", {"sandbox_id": clones[0]})
        assert (await run(client, "true"))["sandbox_id"] == box
    await eventually(lambda: is_paused(installation, box), seconds=20)
    async with connect(installation) as client:
        again = await run(client, "cat notes/a.txt", sandbox_id=box)
        assert again["stdout"] == "grüße"
        await client.call_tool("kill_sandbox", {"sandbox_id": box})


@TRANSPORTS
async def test_a_command_is_killed_at_its_deadline_and_its_output_is_kept(
    installation: Installation, connect: Callable[[Installation], Any]
) -> None:
    async with connect(installation) as client:
        done = await run(client, "echo begun; sleep 1234", timeout_seconds=5)
        assert (done["stdout"], done["exit_code"]) == ("begun\n", None)
        assert "killed after 5 s" in done["stopped"]
        left = await run(client, "pgrep -f '[s]leep 1234' | wc -l")
        assert left["stdout"] == "0\n"
        await client.call_tool("kill_sandbox")


@TRANSPORTS
async def test_a_command_whose_call_is_cancelled_is_killed(
    installation: Installation, connect: Callable[[Installation], Any]
) -> None:
    async with connect(installation) as client:
        box = (await run(client, "true"))["sandbox_id"]
        call = asyncio.create_task(run(client, "touch begun; sleep 4321"))
        await run(client, "until [ -e begun ]; do sleep 0.05; done")
        call.cancel()
        await asyncio.wait((call,))
        await run(client, "while pgrep -f '[s]leep 4321'; do sleep 0.05; done", timeout_seconds=20)
        await client.call_tool("kill_sandbox", {"sandbox_id": box})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["term", "int"])
async def test_a_server_that_is_told_to_end_pauses_its_sandbox(
    installation: Installation, number: signal.Signals
) -> None:
    process = await asyncio.create_subprocess_exec(
        *STDIO,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, **environment(installation)},
        limit=1 << 20,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    about = {"protocolVersion": "2025-11-25", "capabilities": {}}
    about["clientInfo"] = {"name": "test", "version": "1"}
    call = {"name": "run_command", "arguments": {"command": "true"}}
    for message in (
        {"id": 1, "method": "initialize", "params": about},
        {"method": "notifications/initialized"},
        {"id": 2, "method": "tools/call", "params": call},
    ):
        process.stdin.write(msgspec.json.encode({"jsonrpc": "2.0", **message}) + b"\n")
    await process.stdout.readline()
    answer = await process.stdout.readline()
    box = msgspec.json.decode(answer)["result"]["structuredContent"]["sandbox_id"]
    process.send_signal(number)
    async with asyncio.timeout(20):
        assert await process.wait() == 0
    assert await is_paused(installation, box)


async def test_a_session_continues_after_a_restart_of_the_control_plane(
    installation: Installation,
) -> None:
    async with over_http(installation) as client:
        before = await run(client, "echo kept > kept")
        installation.kill("control")
        await installation.start_control()
        after = await run(client, "cat kept")
        assert (after["sandbox_id"], after["stdout"]) == (before["sandbox_id"], "kept\n")
        await client.call_tool("kill_sandbox")


async def test_a_key_of_another_team_cannot_use_the_sandbox(installation: Installation) -> None:
    other = await api(installation, "POST", "/api-keys", {"name": "other", "teamName": "other"})
    async with over_http(installation) as client:
        box = (await run(client, "true"))["sandbox_id"]
        headers = {"X-API-Key": other["key"]}
        async with (
            httpx2.AsyncClient(headers=headers, timeout=60) as http,
            Client(streamable_http_client(f"{installation.url}/mcp", http_client=http)) as foreign,
        ):
            for tool in ("run_command", "kill_sandbox", "pause_sandbox"):
                arguments = {"sandbox_id": box}
                if tool == "run_command":
                    arguments["command"] = "true"
                assert (await foreign.call_tool(tool, arguments)).is_error
            listed = structured(await foreign.call_tool("list_sandboxes"))
            assert listed["sandboxes"] == []
        assert (await run(client, "true"))["sandbox_id"] == box
        await client.call_tool("kill_sandbox")


async def test_bytes_survive_a_file(installation: Installation) -> None:
    data = bytes(range(256)) * 10
    async with over_http(installation) as client:
        written = {"path": "a.bin", "content": base64.b64encode(data).decode()}
        await client.call_tool("write_file", {**written, "encoding": "base64"})
        read = structured(await client.call_tool("read_file", {"path": "a.bin"}))
        assert base64.b64decode(read["content"]) == data
        await client.call_tool("kill_sandbox")
