"""A proxy between the roles and the API server that lets scenarios intercept writes.

Requests pass unchanged in both directions; watches are streamed. A write of one of Paddock's kinds
is first passed to a hook, if set: a scenario's `store.update = …` becomes a function that receives
every update of every process. What it raises is returned to that process.
"""

import contextlib
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import aiohttp
from aiohttp import web

from paddock.kit.errors import AlreadyExistsError, ConflictError, NotFoundError
from paddock.resources import codec, registry
from paddock.resources.meta import GROUP
from tests.cluster.control_plane import KubeCluster

Hook = Callable[..., Awaitable[Any]]
_CODES: dict[type[Exception], tuple[int, str]] = {
    AlreadyExistsError: (409, "AlreadyExists"),
    ConflictError: (409, "Conflict"),
    NotFoundError: (404, "NotFound"),
}
_OURS = {info.cls.PLURAL: info.cls for info in registry.KINDS}
_HOPS = frozenset(("connection", "keep-alive", "transfer-encoding", "content-length", "host"))
_LARGEST = 64 << 20


class InterceptingProxy:
    """Forwards requests to an API server, unless a hook answers them."""

    def __init__(self, cluster: KubeCluster) -> None:
        self._target = cluster.info.server
        self._certificate, self._key = cluster.authority.server("wire")
        self._trust = ssl.create_default_context(cafile=cluster.info.ca_file)
        self.hooks: dict[str, Hook] = {}
        """Hooks by method of the store: create, update, update_status."""
        self.url = ""

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncGenerator["InterceptingProxy"]:
        """Forward requests during the body."""
        connector = aiohttp.TCPConnector(limit=0, ssl=self._trust)
        async with aiohttp.ClientSession(
            connector=connector, auto_decompress=False, timeout=aiohttp.ClientTimeout(total=None)
        ) as self._session:
            application = web.Application(client_max_size=_LARGEST)
            application.router.add_route("*", "/{path:.*}", self._serve)
            runner = web.AppRunner(
                application, access_log=None, shutdown_timeout=0.1, handler_cancellation=True
            )
            await runner.setup()
            served = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            served.load_cert_chain(self._certificate, self._key)
            site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=served)
            await site.start()
            self.url = f"https://127.0.0.1:{runner.addresses[0][1]}"
            try:
                yield self
            finally:
                await runner.cleanup()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        hook, kind = self._asked(request)
        if hook is not None and kind is not None:
            return await self._answered(request, hook, codec.decode(kind, body))
        headers = {
            name: text for name, text in request.headers.items() if name.lower() not in _HOPS
        }
        try:
            async with self._session.request(
                request.method, self._target + request.raw_path, data=body or None, headers=headers
            ) as answer:
                return await self._passed(request, answer)
        except (aiohttp.ClientError, ConnectionError):
            return _broken(request)

    def _asked(self, request: web.Request) -> tuple[Hook | None, Any]:
        """Return the hook for a request, and the kind of its object."""
        parts = request.path.strip("/").split("/")
        if parts[:2] != ["apis", GROUP] or parts[3:4] != ["namespaces"] or len(parts) < 6:
            return None, None
        verb = {("POST", 6): "create", ("PUT", 7): "update", ("PUT", 8): "update_status"}.get(
            (request.method, len(parts)), ""
        )
        return self.hooks.get(verb), _OURS.get(parts[5])

    async def _answered(self, request: web.Request, hook: Hook, obj: Any) -> web.StreamResponse:
        try:
            done = await hook(obj)
        except (AlreadyExistsError, ConflictError, NotFoundError) as error:
            code, reason = _CODES[type(error)]
            status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code}
            return web.json_response(
                {**status, "reason": reason, "message": error.message}, status=code
            )
        except Exception:
            return _broken(request)
        return web.Response(
            body=codec.encode(done),
            status=201 if request.method == "POST" else 200,
            content_type="application/json",
        )

    async def _passed(
        self, request: web.Request, answer: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        passed = web.StreamResponse(status=answer.status)
        for name, text in answer.headers.items():
            if name.lower() not in _HOPS:
                passed.headers.add(name, text)
        if "watch" not in request.query:
            passed.content_length = len(whole := await answer.read())
            await passed.prepare(request)
            await passed.write(whole)
        else:
            await passed.prepare(request)
            async for data in answer.content.iter_any():
                await passed.write(data)
        await passed.write_eof()
        return passed


def _broken(request: web.Request) -> web.Response:
    """Break the connection, so that the client does not learn the outcome."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=500)
