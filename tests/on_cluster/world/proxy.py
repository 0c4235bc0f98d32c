"""A TCP proxy between Paddock and the API server that a test can cut or hang."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator

_CHUNK = 1 << 16


class TcpProxy:
    """Forwards connections byte for byte, unless it is cut or hanging."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._open = asyncio.Event()
        self._open.set()
        self._pairs: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return len(self._pairs)

    def cut(self) -> int:
        """Break all connections; accept new ones. Return the number of broken ones."""
        broken = tuple(self._pairs)
        for pair in broken:
            for writer in pair:
                writer.transport.abort()
        return len(broken)

    def hang(self) -> None:
        """Stop forwarding silently, like a lost network."""
        self._open.clear()

    def restore(self) -> None:
        """Resume forwarding, including held data, as after retransmissions."""
        self._open.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        pair: tuple[asyncio.StreamWriter, asyncio.StreamWriter] | None = None
        try:
            await self._open.wait()
            back, forth = await asyncio.open_connection("127.0.0.1", self._target)
            pair = (writer, forth)
            self._pairs.add(pair)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._pass(reader, forth))
                tasks.create_task(self._pass(back, writer))
        except* (OSError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            if pair is not None:
                self._pairs.discard(pair)
                pair[1].close()
            writer.close()

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(_CHUNK):
            await self._open.wait()
            sink.write(data)
            await sink.drain()
        await self._open.wait()
        # One side is closed; half-open connections are not used here.
        sink.close()

    @contextlib.asynccontextmanager
    async def run(self, host: str = "127.0.0.1") -> AsyncGenerator["TcpProxy"]:
        """Forward connections during the body."""
        server = await asyncio.start_server(self._serve, host, 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            self.restore()
            self.cut()
            for task in (tasks := tuple(self._tasks)):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
