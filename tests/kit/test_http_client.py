"""The HTTP client against well-behaved and misbehaving servers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from paddock.kit.errors import InvalidError, UnauthenticatedError
from paddock.kit.http_client import HttpClient, NoConnectionError
from paddock.store.kubernetes import Access, KubernetesClient
from paddock.store.kubernetes.credentials import NoCredential, StaticCredential

REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"


class Scripted:
    """A server that sends scripted bytes after each request, and counts connections."""

    def __init__(self, *script: bytes) -> None:
        self.script = list(script)
        self.connections = 0
        self.ended = asyncio.Event()
        self.talking: set[asyncio.Task[None] | None] = set()
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.talking.add(asyncio.current_task())
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                if not self.script:
                    continue  # silence
                said = self.script.pop(0)
                if not said:
                    return
                for start in range(0, len(said), 7):  # answers come in pieces
                    writer.write(said[start : start + 7])
                    await writer.drain()
                    await asyncio.sleep(0)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.ended.set()
        finally:
            writer.close()


@asynccontextmanager
async def serving(*script: bytes) -> AsyncIterator[tuple[Scripted, HttpClient]]:
    server = Scripted(*script)
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/below"
    client = HttpClient(server.url, tls=None, tls_server_name=None, connect_seconds=20)
    try:
        yield server, client
    finally:
        client.close()
        listener.close()
        await asyncio.gather(*(task for task in server.talking if task is not None))


async def test_responses_with_length_and_in_chunks_share_one_connection() -> None:
    chunked = (
        b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 3\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"3\r\nabc\r\n4\r\ndefg\r\n0\r\n\r\n"
    )
    empty = b"HTTP/1.1 204 No Content\r\n\r\n"
    async with serving(PLAIN, chunked, empty, PLAIN) as (server, client):
        answers = [await client.send(REQUEST, 20) for _ in range(4)]
    assert [(item.code, item.body) for item in answers] == [
        (200, b"hi"),
        (429, b"abcdefg"),
        (204, b""),
        (200, b"hi"),
    ]
    assert [item.retry_after for item in answers] == ["", "3", "", ""]
    assert server.connections == 1


async def test_connection_close_is_respected() -> None:
    last = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nhi"
    async with serving(last, PLAIN) as (server, client):
        assert (await client.send(REQUEST, 20)).body == b"hi"
        assert (await client.send(REQUEST, 20)).body == b"hi"
    assert server.connections == 2


async def test_1xx_responses_are_skipped() -> None:
    early = b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"
    async with serving(early + PLAIN, PLAIN) as (server, client):
        assert (await client.send(REQUEST, 20)).code == 200
        assert (await client.send(REQUEST, 20)).code == 200
    assert server.connections == 1


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"SSH-2.0-hello\r\n", id="another protocol"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n", id="no length"),
    ],
)
async def test_an_invalid_response_closes_the_connection(
    said: bytes,
) -> None:
    async with serving(said, PLAIN) as (server, client):
        with pytest.raises(OSError, match=r"closed the connection|HTTP"):
            await client.send(REQUEST, 20)
        assert (await client.send(REQUEST, 20)).body == b"hi"
    assert server.connections == 2


async def test_a_connection_with_unsolicited_bytes_is_not_reused() -> None:
    async with serving(PLAIN + PLAIN, PLAIN.replace(b"hi", b"ho")) as (server, client):
        assert (await client.send(REQUEST, 20)).body == b"hi"
        async with asyncio.timeout(20):
            await server.ended.wait()
        assert (await client.send(REQUEST, 20)).body == b"ho"
    assert server.connections == 2


async def test_a_cancelled_request_closes_its_connection() -> None:
    async with serving() as (server, client):
        with pytest.raises(TimeoutError):
            await client.send(REQUEST, 0.05)
        async with asyncio.timeout(20):
            await server.ended.wait()
        server.ended.clear()
        asked = asyncio.ensure_future(client.send(REQUEST, 60))
        while server.connections < 2:
            await asyncio.sleep(0)
        asked.cancel()
        async with asyncio.timeout(20):
            await server.ended.wait()
    assert asked.cancelled()


async def test_a_refused_connection_differs_from_a_broken_one() -> None:
    async with serving() as (server, _):
        address = server.url
    client = HttpClient(address, tls=None, tls_server_name=None, connect_seconds=20)
    with pytest.raises(NoConnectionError):
        await client.send(REQUEST, 20)


async def test_an_unresolvable_name_is_no_connection() -> None:
    client = HttpClient("http://a..b:1", tls=None, tls_server_name=None, connect_seconds=20)
    with pytest.raises(NoConnectionError):
        await client.send(REQUEST, 20)


async def test_a_closed_client_leaves_no_connection_open() -> None:
    async with serving(PLAIN) as (server, client):
        asked = asyncio.ensure_future(client.send(REQUEST, 60))
        await asyncio.sleep(0)  # on its way, and not there yet
        client.close()
        with pytest.raises(NoConnectionError):
            await asked
        with pytest.raises(NoConnectionError):
            await client.send(REQUEST, 60)
        assert server.script, "nobody asked"


async def test_neither_a_path_nor_a_token_can_add_lines_to_a_request() -> None:
    async with serving(PLAIN) as (server, _):
        client = KubernetesClient(Access(server=server.url, credential=NoCredential()))
        with pytest.raises(InvalidError, match="not a valid path"):
            await client.request("GET", "/a HTTP/1.1\r\nX: y")
        await client.close()
        broken = StaticCredential.bearer("a\r\nX: y")
        client = KubernetesClient(Access(server=server.url, credential=broken))
        with pytest.raises(UnauthenticatedError, match="contains invalid characters"):
            await client.request("GET", "/a")
        await client.close()
    assert server.connections == 0
