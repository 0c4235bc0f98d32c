"""What lies between Paddock and the API server, in the hands of a test: cut it, or let it hang."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator

_CHUNK = 1 << 16


class Road:
    """Forwards connections byte for byte, unless it is told not to."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._open = asyncio.Event()
        self._open.set()
        self._pairs: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    @property
    def connections(self) -> int:
        """How many connections there are."""
        return len(self._pairs)

    def cut(self) -> int:
        """Break every connection there is; new ones come through. Says how many broke."""
        broken = tuple(self._pairs)
        for pair in broken:
            for writer in pair:
                writer.transport.abort()
        return len(broken)

    def swallow(self) -> None:
        """Forward nothing any more, and tell nobody: a network that is gone."""
        self._open.clear()

    def restore(self) -> None:
        """Be a network again. What was held goes on as a network's retries would let it."""
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
        # One side is done; neither of ours uses half of a connection.
        sink.close()

    @contextlib.asynccontextmanager
    async def run(self, host: str = "127.0.0.1") -> AsyncGenerator["Road"]:
        """Forward beside the body."""
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
