"""One request, one answer: what servers may say, and what they may not."""

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
    """Says one piece of bytes after each request, and counts who came."""

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
async def asking(*script: bytes) -> AsyncIterator[tuple[Scripted, HttpClient]]:
    server = Scripted(*script)
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/below"
    exchange = HttpClient(server.url, tls=None, tls_server_name=None, connect_seconds=20)
    try:
        yield server, exchange
    finally:
        exchange.close()
        listener.close()
        await asyncio.gather(*(task for task in server.talking if task is not None))


async def test_answers_of_known_length_and_in_chunks_come_over_one_connection() -> None:
    chunked = (
        b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 3\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"3\r\nabc\r\n4\r\ndefg\r\n0\r\n\r\n"
    )
    empty = b"HTTP/1.1 204 No Content\r\n\r\n"
    async with asking(PLAIN, chunked, empty, PLAIN) as (server, exchange):
        answers = [await exchange.send(REQUEST, 20) for _ in range(4)]
    assert [(item.code, item.body) for item in answers] == [
        (200, b"hi"),
        (429, b"abcdefg"),
        (204, b""),
        (200, b"hi"),
    ]
    assert [item.retry_after for item in answers] == ["", "3", "", ""]
    assert server.connections == 1


async def test_a_server_that_wants_to_part_is_let_go() -> None:
    last = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nhi"
    async with asking(last, PLAIN) as (server, exchange):
        assert (await exchange.send(REQUEST, 20)).body == b"hi"
        assert (await exchange.send(REQUEST, 20)).body == b"hi"
    assert server.connections == 2


async def test_what_comes_before_the_answer_proper_is_not_taken_for_it() -> None:
    early = b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"
    async with asking(early + PLAIN, PLAIN) as (server, exchange):
        assert (await exchange.send(REQUEST, 20)).code == 200
        assert (await exchange.send(REQUEST, 20)).code == 200
    assert server.connections == 1


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"SSH-2.0-hello\r\n", id="another protocol"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n", id="no length"),
    ],
)
async def test_what_is_no_answer_breaks_the_connection_and_the_next_gets_another(
    said: bytes,
) -> None:
    async with asking(said, PLAIN) as (server, exchange):
        with pytest.raises(OSError, match=r"hung up|HTTP"):
            await exchange.send(REQUEST, 20)
        assert (await exchange.send(REQUEST, 20)).body == b"hi"
    assert server.connections == 2


async def test_a_server_that_says_more_than_it_was_asked_is_not_asked_again() -> None:
    async with asking(PLAIN + PLAIN, PLAIN.replace(b"hi", b"ho")) as (server, exchange):
        assert (await exchange.send(REQUEST, 20)).body == b"hi"
        async with asyncio.timeout(20):
            await server.ended.wait()
        assert (await exchange.send(REQUEST, 20)).body == b"ho"
    assert server.connections == 2


async def test_a_request_that_is_given_up_takes_its_connection_with_it() -> None:
    async with asking() as (server, exchange):
        with pytest.raises(TimeoutError):
            await exchange.send(REQUEST, 0.05)
        async with asyncio.timeout(20):
            await server.ended.wait()
        server.ended.clear()
        asked = asyncio.ensure_future(exchange.send(REQUEST, 60))
        while server.connections < 2:
            await asyncio.sleep(0)
        asked.cancel()
        async with asyncio.timeout(20):
            await server.ended.wait()
    assert asked.cancelled()


async def test_nobody_listening_is_told_apart_from_a_connection_that_broke() -> None:
    async with asking() as (server, _):
        address = server.url
    exchange = HttpClient(address, tls=None, tls_server_name=None, connect_seconds=20)
    with pytest.raises(NoConnectionError):
        await exchange.send(REQUEST, 20)


async def test_a_name_that_nobody_can_look_up_is_nobody_listening() -> None:
    exchange = HttpClient("http://a..b:1", tls=None, tls_server_name=None, connect_seconds=20)
    with pytest.raises(NoConnectionError):
        await exchange.send(REQUEST, 20)


async def test_one_that_is_closed_leaves_no_connection_behind() -> None:
    async with asking(PLAIN) as (server, exchange):
        asked = asyncio.ensure_future(exchange.send(REQUEST, 60))
        await asyncio.sleep(0)  # on its way, and not there yet
        exchange.close()
        with pytest.raises(NoConnectionError):
            await asked
        with pytest.raises(NoConnectionError):
            await exchange.send(REQUEST, 60)
        assert server.script, "nobody asked"


async def test_neither_a_path_nor_a_token_can_add_lines_to_a_request() -> None:
    async with asking(PLAIN) as (server, _):
        client = KubernetesClient(Access(server=server.url, credential=NoCredential()))
        with pytest.raises(InvalidError, match="not a path"):
            await client.request("GET", "/a HTTP/1.1\r\nX: y")
        await client.close()
        broken = StaticCredential.bearer("a\r\nX: y")
        client = KubernetesClient(Access(server=server.url, credential=broken))
        with pytest.raises(UnauthenticatedError, match="no text that a request can carry"):
            await client.request("GET", "/a")
        await client.close()
    assert server.connections == 0
