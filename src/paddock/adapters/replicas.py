"""Pushes the writes of one API replica to the others over HTTP, before the client gets a response.

The next request of a client may reach another replica, whose watch lags behind. So each write is
pushed to all replicas at once, and the response waits until they have it. A replica that does not
answer in time is skipped for a while and catches up by its own watch. `store/replicated.py` is the
store that pushes every write.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

from paddock.adapters.membership import base_url, parse_peers
from paddock.cache.provider import Provider
from paddock.kit import bearer, ids
from paddock.kit.errors import PaddockError
from paddock.kit.logs import fields
from paddock.resources import codec, registry
from paddock.resources.meta import Resource

log = logging.getLogger(__name__)

PATH = "/_paddock/written"
PUSH_TIMEOUT_SECONDS = 1.0
"""For one attempt. A write waits at most two attempts for a replica, once per `SKIP_SECONDS`."""
SKIP_SECONDS = 5.0
"""How long a replica that did not answer is skipped."""
RESOLVE_SECONDS = 3.0
_OWN = 208
_KIND, _GONE, _FROM = "x-paddock-kind", "x-paddock-gone", "x-paddock-from"

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Application = Callable[[Any, Any, Any], Awaitable[None]]


class Replicas:
    """The other replicas of the API."""

    def __init__(self, setting: str, token: str) -> None:
        self._static, self._names, _ = parse_peers(setting, takes_services=False)
        self._urls: set[str] = set(self._static)
        self._own_urls: set[str] = set()
        self._skipped: dict[str, float] = {}
        self._identity = ids.uid()
        self._token = token
        self._session: aiohttp.ClientSession | None = None

    async def keep_resolved(self) -> None:
        """Resolve the names of replicas at intervals, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            found = set(self._static)
            for name, port in self._names:
                try:
                    addresses = await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM)
                except OSError as error:
                    log.warning(
                        "replicas were not resolved", extra=fields(name=name, error=repr(error))
                    )
                    found |= self._urls
                    continue
                found |= {base_url(str(address[4][0]), port) for address in addresses}
            self._urls = found
            await asyncio.sleep(RESOLVE_SECONDS)

    async def notify(self, obj: Resource, *, is_gone: bool) -> None:
        """Push a write; return once every other replica has it or is skipped."""
        now = asyncio.get_running_loop().time()
        others = [url for url in self._urls - self._own_urls if self._skipped.get(url, 0.0) <= now]
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
        # Twice: a pooled connection may just have been closed, or this process been suspended.
        if not await self._is_pushed(url, body, headers) and not await self._is_pushed(
            url, body, headers
        ):
            self._skipped[url] = asyncio.get_running_loop().time() + SKIP_SECONDS

    async def _is_pushed(self, url: str, body: bytes, headers: dict[str, str]) -> bool:
        if self._session is None:
            self._session = aiohttp.ClientSession()
        try:
            async with (
                asyncio.timeout(PUSH_TIMEOUT_SECONDS),
                self._session.post(url + PATH, data=body, headers=headers) as response,
            ):
                if response.status == _OWN:
                    self._own_urls.add(url)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            log.info(
                "a write was not pushed to a replica", extra=fields(url=url, error=repr(error))
            )
            return False
        return True

    def application(self, inner: Application, provider: Provider) -> Application:
        """Return an application that receives pushed writes and passes all else to `inner`."""

        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["path"] != PATH:
                await inner(scope, receive, send)
                return
            headers = {
                name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
            }
            if not bearer.is_authorized(headers.get("authorization", ""), self._token):
                await _respond(send, 401)
            elif headers.get(_FROM) == self._identity:
                await _respond(send, _OWN)
            else:
                body = await _body(receive)
                await _respond(send, self._observe(provider, headers, body))

        return serve

    def _observe(self, provider: Provider, headers: dict[str, str], body: bytes) -> int:
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
        """Close the connections."""
        if self._session is not None:
            await self._session.close()


async def _body(receive: Receive) -> bytes:
    parts: list[bytes] = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def _respond(send: Send, status: int) -> None:
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": b""})
