"""A relay in front of a registry: it sends as much of a blob as a test lets it, and counts.

async with Relay(server) as relay:
    held = relay.hold("/v2/app/blobs/", after=1000)
    ...
    await held.reached.wait()   # the client has got 1000 bytes of a blob, and waits
    held.release.set()
"""

import asyncio
import contextlib
from typing import Self

import aiohttp
from aiohttp import web

from tests.ports import free_port
from tests.runtime.local.images.registry.servers import Registry

_CHUNK = 64 << 10
_PASSED_ON = ("Accept", "Authorization", "Range")
_RETURNED = (
    "Content-Type",
    "Content-Range",
    "Docker-Content-Digest",
    "WWW-Authenticate",
    "Location",
)


class Held:
    """Responses that stop after so many bytes of their body."""

    def __init__(self, path: str, after: int) -> None:
        self.path = path
        self.after = after
        self.reached = asyncio.Event()
        self.release = asyncio.Event()


class Relay:
    """Forwards requests to a registry."""

    def __init__(self, origin: Registry) -> None:
        self.host = f"127.0.0.1:{free_port()}"
        self.requests: list[tuple[str, str]] = []
        """Path and range of each request, in the order of arrival."""
        self._origin = origin.url
        self._held: list[Held] = []

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(auto_decompress=False)
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._forward)
        # A client that was killed leaves its request, which then ends by its release.
        self._runner = web.AppRunner(app, shutdown_timeout=1)
        await self._runner.setup()
        port = int(self.host.rpartition(":")[2])
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for held in self._held:
            held.release.set()
        await self._runner.cleanup()
        await self._http.close()

    def hold(self, path: str, *, after: int = 0) -> Held:
        """Stop responses to requests whose path begins so, until they are released."""
        held = Held(path, after)
        self._held.append(held)
        return held

    def count(self, text: str = "") -> int:
        """Return how many requests have arrived whose path contains a text.

        Unlike the registry's access log, which may get a line after the client has its response.
        """
        return sum(text in path for path, _ in self.requests)

    def ranges_of(self, path: str) -> list[str]:
        """Return the ranges of all requests for a path; empty: the whole."""
        return [given for requested, given in self.requests if requested == path]

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        self.requests.append((request.path, request.headers.get("Range", "")))
        headers = {name: request.headers[name] for name in _PASSED_ON if name in request.headers}
        url = self._origin + request.path_qs
        async with self._http.request(
            request.method, url, headers=headers, allow_redirects=False
        ) as answer:
            body = await answer.read()
            response = web.StreamResponse(status=answer.status)
            for name in _RETURNED:
                if name in answer.headers:
                    response.headers[name] = answer.headers[name]
        response.content_length = len(body)
        with contextlib.suppress(ConnectionError):  # the client was killed
            await self._send(request, response, body)
        return response

    async def _send(self, request: web.Request, response: web.StreamResponse, body: bytes) -> None:
        held = next((one for one in self._held if request.path.startswith(one.path)), None)
        if held is not None and held.release.is_set():
            held = None
        if held is not None and not held.after:
            held.reached.set()
            await held.release.wait()
            held = None
        await response.prepare(request)
        stop = held.after if held is not None else len(body)
        for start in range(0, stop, _CHUNK):
            await response.write(body[start : min(start + _CHUNK, stop)])
        if held is not None:
            held.reached.set()
            await held.release.wait()
            await response.write(body[stop:])
        await response.write_eof()
