"""The API on a real socket, in its own thread, for clients that are separate programs."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import uvicorn

from paddock.api.kube.app import create_app
from paddock.api.kube.settings import KubeApiSettings
from paddock.store.memory import MemoryStore

T = TypeVar("T")
START_SECONDS = 60.0


class Server:
    """A running API and its store."""

    def __init__(self, settings: KubeApiSettings, **options: Any) -> None:
        self.settings = settings
        self.store: MemoryStore
        self._options = options
        self._loop: asyncio.AbstractEventLoop
        self._server: uvicorn.Server
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kube api")

    @property
    def url(self) -> str:
        port = self._server.servers[0].sockets[0].getsockname()[1]
        scheme = "https" if "ssl_certfile" in self._options else "http"
        return f"{scheme}://127.0.0.1:{port}"

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the event loop of the store."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(START_SECONDS)

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(START_SECONDS)
        deadline = time.monotonic() + START_SECONDS
        while not self._server.started:
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.01)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(START_SECONDS)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.store = MemoryStore(enforce_namespaces=True, history=50)
        config = uvicorn.Config(
            create_app(self.store, self.settings),
            host="127.0.0.1",
            port=0,
            log_level="warning",
            timeout_graceful_shutdown=1,
            **self._options,
        )
        self._server = uvicorn.Server(config)
        self._ready.set()
        try:
            await self._server.serve()
        finally:
            await self.store.close()


@contextlib.contextmanager
def serving(settings: KubeApiSettings, **options: Any) -> Iterator[Server]:
    server = Server(settings, **options)
    server.start()
    try:
        yield server
    finally:
        server.stop()
