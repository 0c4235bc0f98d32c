"""The HTTP server of the control plane."""

import contextlib
import socket
import ssl
from collections.abc import Callable, Generator
from typing import Any

import uvicorn

from paddock.kit.errors import UnavailableError


class AsgiServer(uvicorn.Server):
    """A uvicorn server that leaves signals to the supervisor."""

    def __init__(
        self,
        app: Any,
        listener: socket.socket,
        on_ready: Callable[[], None],
        *,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        config = uvicorn.Config(
            app,
            loop="none",
            http="httptools",
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            date_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=3,
            backlog=2048,
        )
        if tls is not None:
            # A context instead of files: the caller can load a renewed certificate into it.
            config.load()
            config.ssl = tls
        super().__init__(config)
        self._listener = listener
        self._on_ready = on_ready

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Install no signal handlers."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start serving."""
        await super().startup(sockets)
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finish requests but close streams: they have no end, and watchers reconnect."""
        for connection in list(self.server_state.connections):
            cycle = getattr(connection, "cycle", None)
            if cycle is not None and cycle.response_started and not cycle.response_complete:
                connection.transport.close()
        await super().shutdown(sockets)

    async def run_until_stopped(self) -> None:
        """Serve until `should_exit` is set."""
        await self.serve(sockets=[self._listener])


def listen(host: str, port: int) -> socket.socket:
    """Open a listening TCP socket."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise UnavailableError(
            f"cannot listen on {host}:{port}: {error.strerror}",
            hint="stop the process there, or choose another port (docs/reference/settings.md)",
        ) from error
    listener.listen(2048)
    listener.setblocking(False)
    return listener
