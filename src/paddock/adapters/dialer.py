"""Connects to ports of sandboxes: by sockets in their network namespaces, or by pod address."""

import asyncio
import contextlib
import os
import socket
from urllib.parse import urlsplit

from paddock.gateway.http.upstream import UpstreamConnection
from paddock.gateway.routing.addressing import ENVD_PORT, TASKS_PORT
from paddock.gateway.routing.routes import Route
from paddock.runtime.local.driver import LocalRuntime
from paddock.runtime.local.net.netns import socket_in
from paddock.settings import Settings

_TRIES = 5


class LocalDialer:
    """Connects through sockets that are created in the network namespace of a sandbox."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._nodes: dict[str, LocalRuntime] = {}
        self._namespaces: dict[tuple[str, int], int] = {}

    async def dial(
        self, route: Route, port: int, protocol: UpstreamConnection
    ) -> UpstreamConnection:
        """Connect to a port of a sandbox."""
        loop = asyncio.get_running_loop()
        envd = route.envd
        if port in (ENVD_PORT, TASKS_PORT) and envd is not None and envd.startswith("unix:"):
            await loop.create_unix_connection(lambda: protocol, envd.removeprefix("unix:"))
            return protocol
        if port == TASKS_PORT and envd is not None and envd.startswith("http:"):
            # envd of a pod serves the task API on its own port and requires the same token there.
            port = urlsplit(envd).port or ENVD_PORT
        connected = await self._connect(route, port)
        await loop.create_connection(lambda: protocol, sock=connected)
        return protocol

    async def _connect(self, route: Route, port: int) -> socket.socket:
        for attempt in range(_TRIES):
            try:
                return await self._connect_once(route, port)
            except ConnectionRefusedError:
                # A server needs a moment after its start until it listens.
                if attempt == _TRIES - 1:
                    raise
                await asyncio.sleep(0.02 * (attempt + 1))
        raise ConnectionRefusedError

    async def _connect_once(self, route: Route, port: int) -> socket.socket:
        if route.node is None:
            family = socket.AF_INET6 if ":" in (route.ip or "") else socket.AF_INET
            opened = socket.socket(family, socket.SOCK_STREAM)
            return await _connected(opened, (route.ip or "", port))
        namespace = await self._namespace(route)
        try:
            return await _connected(socket_in(namespace, socket.AF_INET), ("127.0.0.1", port))
        except ConnectionRefusedError:
            # Some servers listen on ::1 only, others on the address of the sandbox.
            for family, host in ((socket.AF_INET6, "::1"), (socket.AF_INET, route.ip)):
                if host is not None:
                    with contextlib.suppress(OSError):
                        return await _connected(socket_in(namespace, family), (host, port))
            raise

    async def _namespace(self, route: Route) -> int:
        key = (route.uid, route.incarnation)
        known = self._namespaces.get(key)
        if known is not None:
            return known
        path = (route.node or "").removeprefix("unix:")
        node = self._nodes.setdefault(path, LocalRuntime(path))
        opened = await node.netns(route.uid)
        # Another request may have been faster: keep one descriptor.
        known = self._namespaces.setdefault(key, opened)
        if known != opened:
            os.close(opened)
        return known

    def forget(self, old: Route | None, new: Route | None) -> None:
        """Close the network namespace of an ended incarnation, so the kernel can free it."""
        if old is None or (
            new is not None and (new.uid, new.incarnation) == (old.uid, old.incarnation)
        ):
            return
        descriptor = self._namespaces.pop((old.uid, old.incarnation), None)
        if descriptor is not None:
            os.close(descriptor)

    async def dial_api(self, protocol: UpstreamConnection) -> UpstreamConnection:
        """Connect to the API."""
        loop = asyncio.get_running_loop()
        await loop.create_connection(
            lambda: protocol, self._settings.api_host, self._settings.api_port
        )
        return protocol


async def _connected(opened: socket.socket, address: tuple[str, int]) -> socket.socket:
    """Connect a socket; close it on failure."""
    try:
        opened.setblocking(False)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().sock_connect(opened, address)
    except BaseException:
        opened.close()
        raise
    return opened
