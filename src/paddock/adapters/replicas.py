"""Announces the writes of one API replica to the others over HTTP, before the client hears of them.

A client's next request may reach another replica, whose watch is a moment behind. So a write is
announced to all replicas at once, and answered when they have it, or have had their chance: one
that does not answer is skipped for a while and catches up by its own watch. The store that does
this with every write is `store/replicated.py`.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

from paddock.adapters.membership import parse
from paddock.cache.provider import Provider
from paddock.kit import bearer, ids
from paddock.kit.errors import PaddockError
from paddock.kit.logs import fields
from paddock.resources import codec, registry
from paddock.resources.meta import Resource

log = logging.getLogger(__name__)

PATH = "/_paddock/written"
PATIENCE_SECONDS = 1.0
"""A write waits twice so long for one that hangs, once in `REST_SECONDS`; who is busy is told."""
REST_SECONDS = 5.0
"""How long a replica that did not answer is left alone."""
RESOLVE_SECONDS = 3.0
_OURSELVES = 208
_KIND, _GONE, _FROM = "x-paddock-kind", "x-paddock-gone", "x-paddock-from"

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Application = Callable[[Any, Any, Any], Awaitable[None]]


class Replicas:
    """The other replicas, and what is told to them."""

    def __init__(self, setting: str, token: str) -> None:
        self._fixed, self._names, _ = parse(setting, takes_services=False)
        self._urls: set[str] = set(self._fixed)
        self._ourselves: set[str] = set()
        self._resting: dict[str, float] = {}
        self._identity = ids.uid()
        self._token = token
        self._session: aiohttp.ClientSession | None = None

    async def keep_found(self) -> None:
        """Look their names up now and then, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            found = set(self._fixed)
            for name, port in self._names:
                try:
                    answers = await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM)
                except OSError as error:
                    log.warning("replicas not found", extra=fields(name=name, error=repr(error)))
                    found |= self._urls
                    continue
                found |= {_url(str(answer[4][0]), port) for answer in answers}
            self._urls = found
            await asyncio.sleep(RESOLVE_SECONDS)

    async def notify(self, obj: Resource, *, is_gone: bool) -> None:
        """Return once every other replica knows, or has had its chance."""
        now = asyncio.get_running_loop().time()
        others = [url for url in self._urls - self._ourselves if self._resting.get(url, 0.0) <= now]
        if others:
            body = codec.encode(obj)
            headers = {
                **bearer.header(self._token),
                _KIND: obj.KIND,
                _GONE: "yes" if is_gone else "",
                _FROM: self._identity,
            }
            await asyncio.gather(*(self._post(url, body, headers) for url in others))

    async def _post(self, url: str, body: bytes, headers: dict[str, str]) -> None:
        # Twice: a kept connection may just have been closed, or this process have stood still.
        if not await self._is_told(url, body, headers) and not await self._is_told(
            url, body, headers
        ):
            self._resting[url] = asyncio.get_running_loop().time() + REST_SECONDS

    async def _is_told(self, url: str, body: bytes, headers: dict[str, str]) -> bool:
        if self._session is None:
            self._session = aiohttp.ClientSession()
        try:
            async with (
                asyncio.timeout(PATIENCE_SECONDS),
                self._session.post(url + PATH, data=body, headers=headers) as response,
            ):
                if response.status == _OURSELVES:
                    self._ourselves.add(url)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            log.info("a replica was not told", extra=fields(url=url, error=repr(error)))
            return False
        return True

    def application(self, inner: Application, provider: Provider) -> Application:
        """Take in what others tell; all else goes on to the application within."""

        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["path"] != PATH:
                await inner(scope, receive, send)
                return
            headers = {
                name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
            }
            if not bearer.is_authorized(headers.get("authorization", ""), self._token):
                await _answer(send, 401)
            elif headers.get(_FROM) == self._identity:
                await _answer(send, _OURSELVES)
            else:
                body = await _body(receive)
                await _answer(send, self._take(provider, headers, body))

        return serve

    def _take(self, provider: Provider, headers: dict[str, str], body: bytes) -> int:
        info = registry.BY_KIND.get(headers.get(_KIND, ""))
        if info is None:
            return 404
        try:
            obj = codec.decode(info.cls, body)
            informer = provider.informer(info.cls)
        except PaddockError:
            return 400
        if not informer.is_synced:
            return 503
        if headers.get(_GONE):
            informer.observe_deleted(obj)
        else:
            informer.observe(obj)
        return 204

    async def close(self) -> None:
        """Hang up."""
        if self._session is not None:
            await self._session.close()


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def _body(receive: Receive) -> bytes:
    parts: list[bytes] = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def _answer(send: Send, status: int) -> None:
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": b""})
