"""A request is retried only if the server cannot have executed it."""

import asyncio
import socket
from pathlib import Path

import pytest

from paddock.kit.errors import (
    DeadlineExceededError,
    RateLimitedError,
    UnauthenticatedError,
    UnavailableError,
)
from paddock.resources.kinds.sandbox import Sandbox, SandboxSpec
from paddock.resources.kinds.template import TemplateRef
from paddock.resources.meta import Key, ObjectMeta, with_meta
from paddock.store.kubernetes import Access, ClientSettings, KubernetesStore
from paddock.store.kubernetes.credentials import FileCredential, NoCredential, StaticCredential
from tests.store.kubernetes.scripted import (
    gives,
    hangs_up,
    refuses,
    sandbox,
    scripted_server,
)

KEY = Key("default", "a")
NEW = Sandbox(
    metadata=ObjectMeta(name="a", namespace="default"),
    spec=SandboxSpec(template_ref=TemplateRef(name="base")),
)


async def test_a_write_rejected_with_429_is_retried() -> None:
    busy = refuses(429, "TooManyRequests", **{"Retry-After": "0"})
    async with scripted_server(busy, busy, gives(sandbox("a", 1), 201)) as server:
        store = server.store()
        made = await store.create(NEW)
        await store.close()
    assert made.metadata.resource_version == "1"
    assert [request.method for request in server.asked] == ["POST"] * 3


async def test_retry_after_is_respected() -> None:
    answers = (refuses(429, "TooManyRequests", **{"Retry-After": "1"}), gives(sandbox("a", 1)))
    async with scripted_server(*answers) as server:
        store = server.store()
        before = asyncio.get_running_loop().time()
        await store.get(Sandbox, KEY)
        await store.close()
    assert asyncio.get_running_loop().time() - before >= 1.0


async def test_a_server_that_stays_busy_is_reported_after_the_last_attempt() -> None:
    busy = refuses(429, "TooManyRequests", **{"Retry-After": "0"})
    async with scripted_server(*[busy] * 3) as server:
        store = server.store(tries=3)
        with pytest.raises(RateLimitedError):
            await store.get(Sandbox, KEY)
        await store.close()
    assert len(server.asked) == 3


async def test_a_write_whose_response_is_lost_is_never_repeated() -> None:
    async with scripted_server(hangs_up(), gives(sandbox("a", 1), 201)) as server:
        store = server.store()
        with pytest.raises(UnavailableError, match="unknown"):
            await store.create(NEW)
        await store.close()
    assert len(server.asked) == 1


async def test_a_compare_and_swap_whose_response_is_lost_is_never_repeated() -> None:
    async with scripted_server(
        gives(sandbox("a", 1)), hangs_up(), gives(sandbox("a", 2))
    ) as server:
        store = server.store()
        found = await store.get(Sandbox, KEY)  # opens a connection for reuse
        with pytest.raises(UnavailableError, match="unknown"):
            await store.update(with_meta(found, labels={"l": "1"}))
        await store.close()
    assert [request.method for request in server.asked] == ["GET", "PUT"]


async def test_a_read_whose_response_is_lost_is_retried() -> None:
    async with scripted_server(
        hangs_up(), hangs_up(), hangs_up(), gives(sandbox("a", 7))
    ) as server:
        store = server.store()
        found = await store.get(Sandbox, KEY)
        await store.close()
    assert found.metadata.resource_version == "7"


async def test_a_write_that_fails_with_a_server_error_is_not_repeated() -> None:
    async with scripted_server(refuses(500, "InternalError", "etcd is away")) as server:
        store = server.store()
        with pytest.raises(UnavailableError, match="etcd is away"):
            await store.create(NEW)
        await store.close()
    assert len(server.asked) == 1


async def test_a_server_that_does_not_respond_causes_a_timeout() -> None:
    async def silence(_: object) -> None:
        await asyncio.sleep(30)

    async with scripted_server(silence) as server:  # type: ignore[arg-type]
        store = server.store(timeout_seconds=0.2)
        with pytest.raises(DeadlineExceededError, match=r"within 0\.2 s"):
            await store.create(NEW)
        await store.close()


async def test_the_error_names_an_unreachable_server() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        access = Access(server=f"http://127.0.0.1:{port}", credential=NoCredential())
        store = KubernetesStore.open(access, ClientSettings(tries=2))
        with pytest.raises(UnavailableError, match=f"127.0.0.1:{port} cannot be reached"):
            await store.get(Sandbox, KEY)
        await store.close()


async def test_a_rotated_token_is_read_when_the_old_one_is_rejected(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("old\n")
    answers = (gives(sandbox("a", 1)), refuses(401, "Unauthorized"), gives(sandbox("a", 2)))
    async with scripted_server(*answers) as server:
        store = server.store(FileCredential(token))
        await store.get(Sandbox, KEY)
        token.write_text("new\n")
        found = await store.get(Sandbox, KEY)
        await store.close()
    assert found.metadata.resource_version == "2"
    sent = [request.headers["Authorization"] for request in server.asked]
    assert sent == ["Bearer old", "Bearer old", "Bearer new"]


async def test_a_static_token_that_is_rejected_is_not_retried() -> None:
    async with scripted_server(refuses(401, "Unauthorized")) as server:
        store = server.store(StaticCredential.bearer("wrong"))
        with pytest.raises(UnauthenticatedError):
            await store.get(Sandbox, KEY)
        await store.close()
    assert len(server.asked) == 1


async def test_connections_are_reused() -> None:
    async with scripted_server(*[gives(sandbox("a", n)) for n in range(10)]) as server:
        store = server.store()
        for _ in range(10):
            await store.get(Sandbox, KEY)
        await store.close()
    assert len({request.transport for request in server.asked}) == 1


async def test_requests_in_flight_are_limited() -> None:
    running = most = 0
    as_many_as_may = asyncio.Event()

    async def slow(request: object) -> object:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if most == 3:
            as_many_as_may.set()
        await as_many_as_may.wait()
        await asyncio.sleep(0.01)
        running -= 1
        return await gives(sandbox("a", 1))(request)  # type: ignore[arg-type]

    async with scripted_server(*[slow] * 20) as server:  # type: ignore[arg-type]
        store = server.store(in_flight=3)
        await asyncio.gather(*(store.get(Sandbox, KEY) for _ in range(20)))
        await store.close()
    assert most == 3


async def test_a_redirect_is_not_followed() -> None:
    async with scripted_server(gives({}, 302, Location="http://127.0.0.1:1/")) as server:
        store = server.store(StaticCredential.bearer("secret"))
        with pytest.raises(UnavailableError):
            await store.get(Sandbox, KEY)
        await store.close()
    assert len(server.asked) == 1


async def test_a_closed_client_sends_no_requests() -> None:
    async with scripted_server() as server:
        store = server.store()
        await store.close()
        with pytest.raises(UnavailableError, match="closed"):
            await store.get(Sandbox, KEY)
    assert server.asked == []
