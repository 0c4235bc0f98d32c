"""`/mcp`: keys, pages and sessions, before the protocol sees a request."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from paddock.api.audit.described import describe_mcp
from paddock.api.audit.log import AuditLog
from paddock.api.audit.middleware import Audited
from paddock.api.call_limits import CallLimits
from paddock.api.login_limits import LoginLimits
from paddock.api.mcp.http import CLIENT, McpApplication, McpClient, McpProtocol
from paddock.api.mcp.origins import PageOrigins
from paddock.api.mcp.package import usable_package
from paddock.kit.clock import LoopClock
from paddock.kit.errors import UnavailableError, UnsupportedError
from paddock.kit.tasks import background
from tests.api.audit.recorded import recording
from tests.scenario.paddock import SECRETS, World, paddock

pytestmark = pytest.mark.looptime

SESSION = "0" * 32
KEY = {"X-API-Key": SECRETS.api_key}


class FakeProtocol:
    """Responds with 200, and remembers who asked."""

    def __init__(self) -> None:
        self.clients: list[McpClient] = []
        self.ended: list[str] = []
        self.failure: Exception | None = None

    @asynccontextmanager
    async def run(self) -> AsyncGenerator[None]:
        yield

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.clients.append(scope[CLIENT])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def end_session(self, client: McpClient) -> None:
        if self.failure:
            raise self.failure
        self.ended.append(client.session_id)


@asynccontextmanager
async def served(
    world: World,
    load: Callable[[], McpProtocol],
    audit: AuditLog | None = None,
) -> AsyncGenerator[httpx.AsyncClient]:
    app = McpApplication(load, world.plane.keyring, world.plane.logins, PageOrigins(""))
    recorded = Audited(app, audit or AuditLog(None, LoopClock()), describe_mcp)
    transport = httpx.ASGITransport(app=recorded, client=("192.0.2.1", 1))
    async with (
        background(app.run(), name="mcp"),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as http,
    ):
        yield http


@pytest.fixture
async def world() -> AsyncGenerator[World]:
    async with paddock(pool_size=0) as world:
        yield world


@pytest.fixture
def protocol() -> FakeProtocol:
    return FakeProtocol()


@pytest.fixture
async def http(world: World, protocol: FakeProtocol) -> AsyncGenerator[httpx.AsyncClient]:
    async with served(world, lambda: protocol) as http:
        yield http


@pytest.mark.parametrize(
    "headers",
    [KEY, {"Authorization": f"Bearer {SECRETS.api_key}"}],
    ids=["header", "bearer"],
)
async def test_an_api_key_is_accepted(
    http: httpx.AsyncClient, protocol: FakeProtocol, headers: dict[str, str]
) -> None:
    answer = await http.post("/mcp", headers=headers)
    assert answer.status_code == 200
    [client] = protocol.clients
    assert (client.key, client.address) == (SECRETS.api_key, "192.0.2.1")


@pytest.mark.parametrize(
    "headers",
    [{}, {"X-API-Key": "wrong"}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic x"}],
    ids=["none", "header", "bearer", "basic"],
)
async def test_other_credentials_are_refused(
    http: httpx.AsyncClient, protocol: FakeProtocol, headers: dict[str, str]
) -> None:
    answer = await http.post("/mcp", headers=headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert not protocol.clients


async def test_wrong_keys_are_slowed_down(http: httpx.AsyncClient) -> None:
    statuses = [
        (await http.post("/mcp", headers={"X-API-Key": f"wrong{n}"})).status_code for n in range(21)
    ]
    assert statuses == [401] * 20 + [429]


async def test_calls_count_for_the_limit_of_the_key(world: World, protocol: FakeProtocol) -> None:
    world.plane.logins = LoginLimits(LoopClock(), calls=CallLimits(LoopClock(), per_key=1))
    async with served(world, lambda: protocol) as http:
        statuses = [(await http.post("/mcp", headers=KEY)).status_code for _ in range(11)]
    assert statuses == [200] * 10 + [429]


async def test_a_refusal_is_in_the_audit_log(world: World, protocol: FakeProtocol) -> None:
    lines, log = recording()
    async with served(world, lambda: protocol, log) as http:
        await http.post("/mcp", headers={"X-API-Key": "wrong"})
        await http.post("/mcp", headers=KEY)
    [event] = lines.take()
    assert (event["responseStatus"]["code"], event["requestURI"]) == (401, "/mcp")


async def test_a_page_of_another_site_is_refused(
    http: httpx.AsyncClient, protocol: FakeProtocol
) -> None:
    answer = await http.post("/mcp", headers={**KEY, "Origin": "https://evil.example"})
    assert answer.status_code == 403
    assert "https://evil.example may not use this server" in answer.text
    assert not protocol.clients


async def test_a_client_without_a_session_gets_the_id_of_a_new_one(
    http: httpx.AsyncClient, protocol: FakeProtocol
) -> None:
    first = (await http.post("/mcp", headers=KEY)).headers["mcp-session-id"]
    second = (await http.post("/mcp", headers=KEY)).headers["mcp-session-id"]
    assert first != second
    answer = await http.post("/mcp", headers={**KEY, "Mcp-Session-Id": first})
    assert "mcp-session-id" not in answer.headers
    assert [client.session_id for client in protocol.clients] == ["", "", first]


@pytest.mark.parametrize("session", ["../../x", "A" * 32, "0" * 33, "x"])
async def test_the_id_of_a_session_has_a_form(http: httpx.AsyncClient, session: str) -> None:
    answer = await http.post("/mcp", headers={**KEY, "Mcp-Session-Id": session})
    assert answer.status_code == 404


async def test_a_client_ends_its_session(http: httpx.AsyncClient, protocol: FakeProtocol) -> None:
    answer = await http.delete("/mcp", headers={**KEY, "Mcp-Session-Id": SESSION})
    assert (answer.status_code, protocol.ended) == (204, [SESSION])
    assert (await http.delete("/mcp", headers=KEY)).status_code == 400


async def test_a_session_ends_even_if_its_sandbox_cannot_be_paused(
    http: httpx.AsyncClient, protocol: FakeProtocol, caplog: pytest.LogCaptureFixture
) -> None:
    protocol.failure = UnavailableError("the node does not answer")
    answer = await http.delete("/mcp", headers={**KEY, "Mcp-Session-Id": SESSION})
    assert answer.status_code == 204
    assert "sandbox was not paused" in caplog.text


async def test_there_is_no_stream_of_messages_of_the_server(http: httpx.AsyncClient) -> None:
    answer = await http.get("/mcp", headers={**KEY, "Mcp-Session-Id": SESSION})
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST, DELETE")


async def test_without_the_package_the_reason_is_reported(world: World) -> None:
    def load() -> McpProtocol:
        raise UnsupportedError("the package mcp is not installed", hint="pip install")

    async with served(world, load) as http:
        for _ in range(2):
            answer = await http.post("/mcp", headers=KEY)
            assert answer.status_code == 501
            assert "the package mcp is not installed; pip install" in answer.text
        assert (await http.post("/mcp")).status_code == 401


async def test_clients_that_come_while_the_package_is_imported_wait(
    world: World, protocol: FakeProtocol
) -> None:
    loads: list[int] = []

    def load() -> McpProtocol:
        loads.append(1)
        return protocol

    async with served(world, load) as http:
        answers = await asyncio.gather(*(http.post("/mcp", headers=KEY) for _ in range(5)))
    assert [answer.status_code for answer in answers] == [200] * 5
    assert len(loads) == 1


@pytest.mark.parametrize("place", ["load", "run"])
async def test_a_failure_of_the_package_is_reported_and_ends_nothing(
    world: World, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    class Broken(FakeProtocol):
        @asynccontextmanager
        async def run(self) -> AsyncGenerator[None]:
            raise TypeError("unexpected argument")
            yield

    def load() -> McpProtocol:
        if place == "load":
            raise TypeError("unexpected argument")
        return Broken()

    async with served(world, load) as http:
        for _ in range(2):
            answer = await http.post("/mcp", headers=KEY)
            assert answer.status_code == 503
            assert "unexpected argument" in answer.text
    assert "MCP cannot be served" in caplog.text


def test_another_version_of_the_package_is_unsupported() -> None:
    with (
        pytest.raises(UnsupportedError, match="does not fit: no streamable_http"),
        usable_package(),
    ):
        raise ImportError("no streamable_http")
