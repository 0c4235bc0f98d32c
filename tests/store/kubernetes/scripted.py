"""A scripted API server, for errors and broken connections that are rare on a real one."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from paddock.store.kubernetes import Access, ClientSettings, KubernetesStore
from paddock.store.kubernetes.credentials import Credential, NoCredential

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


def sandbox(name: str, version: int, **status: Any) -> dict[str, Any]:
    return {
        "apiVersion": "paddock.dev/v1alpha1",
        "kind": "Sandbox",
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": f"uid-{name}",
            "resourceVersion": str(version),
        },
        "spec": {},
        "status": status,
    }


def event(change: str, obj: Mapping[str, Any]) -> bytes:
    return json.dumps({"type": change, "object": obj}, separators=(",", ":")).encode() + b"\n"


def bookmark(version: int) -> bytes:
    return event("BOOKMARK", {"kind": "Sandbox", "metadata": {"resourceVersion": str(version)}})


def status(code: int, reason: str, message: str = "no", **details: Any) -> dict[str, Any]:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "code": code,
        "reason": reason,
        "message": message,
        "details": details,
    }


def gives(body: Mapping[str, Any], code: int = 200, **headers: str) -> Answer:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response(body, status=code, headers=headers)

    return answer


def refuses(code: int, reason: str, message: str = "no", **headers: str) -> Answer:
    return gives(status(code, reason, message), code, **headers)


def streams(*chunks: bytes, cut: bool = False) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
        if cut and request.transport is not None:
            request.transport.abort()
        return response

    return answer


def hangs_up() -> Answer:
    async def answer(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    return answer


class ScriptedServer:
    """Sends the scripted responses in order and records the requests."""

    def __init__(self) -> None:
        self.script: list[Answer] = []
        self.asked: list[web.Request] = []
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request)
        await request.read()
        if not self.script:
            return web.json_response(status(500, "InternalError", "the script is over"), status=500)
        return await self.script.pop(0)(request)

    def store(self, credential: Credential | None = None, **settings: Any) -> KubernetesStore:
        access = Access(server=self.url, credential=credential or NoCredential())
        return KubernetesStore.open(access, ClientSettings(**settings))


@asynccontextmanager
async def scripted_server(*script: Answer) -> AsyncIterator[ScriptedServer]:
    server = ScriptedServer()
    server.script += script
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    server.url = f"http://{host}:{port}"
    try:
        yield server
    finally:
        await runner.cleanup()
