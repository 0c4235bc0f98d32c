"""A proxy that a test can shut: connections stay open, but no data passes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit


class StallingProxy:
    """Forwards data between clients and one server while it is open."""

    def __init__(self, server: str) -> None:
        address = urlsplit(server)
        self._host, self._port = str(address.hostname), int(address.port or 443)
        self._open = asyncio.Event()
        self._open.set()
        self.url = ""

    def shut(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                await self._open.wait()
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass  # the other side is closed below
        finally:
            writer.close()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._open.wait()
        theirs = await asyncio.open_connection(self._host, self._port)
        async with asyncio.TaskGroup() as both:
            both.create_task(self._pass(reader, theirs[1]))
            both.create_task(self._pass(theirs[0], writer))


@asynccontextmanager
async def stalling_proxy(server: str) -> AsyncIterator[StallingProxy]:
    made = StallingProxy(server)
    conversations: set[asyncio.Task[None]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        conversations.add(task)
        await made.serve(reader, writer)

    listener = await asyncio.start_server(accept, "127.0.0.1", 0)
    made.url = f"https://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield made
    finally:
        listener.close()
        for task in conversations:
            task.cancel()
        await asyncio.gather(*conversations, return_exceptions=True)
        await listener.wait_closed()
