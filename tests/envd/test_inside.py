"""What code inside a sandbox can ask of its envd: its variables, with the token."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from paddock.envd import server
from paddock.envd.config import Config, EnvdSettings
from paddock.envd.server import Envd
from tests.envd.rig import Response, Wire, write_users

TOKEN = {"X-Access-Token": "the-token"}
SETTINGS = EnvdSettings(access_token="the-token", env_vars={"COLOUR": "blue"})


class Inside:
    """An envd, and callers on the socket for code inside."""

    def __init__(self, envd: Envd, port: int, socket_path: str) -> None:
        self.envd = envd
        self.port = port
        self.socket_path = socket_path

    async def wire(self) -> Wire:
        return Wire(*await asyncio.open_connection("127.0.0.1", self.port))

    async def call(
        self, method: str, path: str, headers: dict[str, str], body: bytes | None = None
    ) -> Response:
        wire = await self.wire()
        try:
            await wire.send(method, path, headers, body)
            return await wire.response(method)
        finally:
            wire.close()


@contextlib.asynccontextmanager
async def opened(directory: Path, settings: EnvdSettings = SETTINGS, **config: object):
    made = Config(
        sandbox_id="isbx", settings=settings, identity_dir=None, **write_users(directory), **config
    )
    envd = Envd(msgspec.json.decode(msgspec.json.encode(made), type=Config))
    path = str(directory / "envd.sock")
    public = socket.socket(socket.AF_UNIX)
    public.bind(path)
    public.listen()
    own = socket.create_server(("127.0.0.1", 0))
    await envd.start(public, None, own)
    try:
        yield Inside(envd, own.getsockname()[1], path)
    finally:
        envd.close()
        await asyncio.sleep(0)


@pytest.fixture
async def inside(tmp_path: Path) -> AsyncIterator[Inside]:
    async with opened(tmp_path) as made:
        yield made


async def test_whoever_has_the_token_gets_the_variables(inside: Inside) -> None:
    answer = await inside.call("GET", "/envs", TOKEN)
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    assert answer.json() == {"E2B_SANDBOX": "true", "E2B_SANDBOX_ID": "isbx", "COLOUR": "blue"}


@pytest.mark.parametrize("headers", [{}, {"X-Access-Token": "the-toke"}], ids=["none", "wrong"])
async def test_without_the_token_nothing_is_told(inside: Inside, headers: dict[str, str]) -> None:
    for path in ("/envs", "/metrics", "/nothing"):
        answer = await inside.call("GET", path, headers)
        assert answer.status == 401
        assert b"blue" not in answer.body


async def test_a_sandbox_without_a_token_serves_its_variables_to_everyone(tmp_path: Path) -> None:
    async with opened(tmp_path, EnvdSettings(env_vars={"COLOUR": "red"})) as inside:
        assert (await inside.call("GET", "/envs", {})).json()["COLOUR"] == "red"


async def test_health_needs_no_token(inside: Inside) -> None:
    assert (await inside.call("GET", "/health", {})).status == 204


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/files?path=/etc/passwd"),
        ("POST", "/files?path=/tmp/x"),
        ("GET", "/metrics"),
        ("POST", "/init"),
        ("GET", "/status"),
        ("POST", "/process.Process/List"),
        ("POST", "/process.Process/Start"),
        ("POST", "/filesystem.Filesystem/ListDir"),
        ("POST", "/files/compose"),
        ("GET", "/tasks"),
        ("GET", "/envs/"),
        ("GET", "//envs"),
    ],
)
async def test_nothing_else_of_envd_is_served_even_with_the_token(
    inside: Inside, method: str, path: str
) -> None:
    headers = TOKEN | {"Content-Type": "application/json"}
    answer = await inside.call(method, path, headers, b"{}" if method == "POST" else None)
    assert answer.status == 404


async def test_variables_can_only_be_read(inside: Inside) -> None:
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert (await inside.call(method, "/envs", TOKEN, b"")).status == 405


async def test_code_inside_holds_a_bounded_number_of_connections(inside: Inside) -> None:
    wires = [await inside.wire() for _ in range(32)]
    for wire in wires:
        await wire.send("GET", "/health", {})
        assert (await wire.response()).status == 204
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await inside.call("GET", "/health", {})
    # The callers outside are not affected.
    reader, writer = await asyncio.open_unix_connection(inside.socket_path)
    outside = Wire(reader, writer)
    await outside.send("GET", "/envs", TOKEN)
    assert (await outside.response()).status == 200
    for wire in (*wires, outside):
        wire.close()


async def test_code_inside_does_not_keep_an_idle_envd(tmp_path: Path) -> None:
    async with opened(tmp_path, idle_exit_seconds=0.3) as inside:
        # Connected first: on a busy machine this could take longer than envd waits.
        wire = await inside.wire()
        ended = asyncio.create_task(inside.envd.run_until_idle())
        async with asyncio.timeout(30):
            while not ended.done():
                try:
                    await wire.send("GET", "/envs", TOKEN)
                    assert (await wire.response()).status == 200
                except (ConnectionError, asyncio.IncompleteReadError):
                    break
            await ended
        wire.close()


@pytest.mark.parametrize("head", [b"POST /health HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n"])
async def test_a_request_from_inside_that_never_ends_does_not_keep_envd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: bytes
) -> None:
    monkeypatch.setattr(server, "_INSIDE_GRACE_SECONDS", 0.2)
    async with opened(tmp_path, idle_exit_seconds=0.1) as inside:
        reader, writer = await asyncio.open_connection("127.0.0.1", inside.port)
        writer.write(head)
        await writer.drain()
        async with asyncio.timeout(20):
            await inside.envd.run_until_idle()
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()
