"""The `node` role: freezes and thaws pods on request, one process per node of a cluster."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable

import msgspec
from aiohttp import web

from paddock.app.wiring.secrets import load_or_create, token_seed
from paddock.kit import bearer
from paddock.kit.errors import NotFoundError, PaddockError
from paddock.resources.tokens import node_tokens
from paddock.runtime.kubernetes import names
from paddock.runtime.kubernetes.freezer import freeze
from paddock.runtime.kubernetes.node_agents import FreezeRequest
from paddock.settings import Settings


def create_app(*tokens: str) -> web.Application:
    """Return the application; every request must carry one of the tokens."""

    async def alive(_request: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def freeze_pod(request: web.Request) -> web.Response:
        if not bearer.is_authorized(request.headers.get("Authorization", ""), *tokens):
            return web.Response(status=401, text="only the controllers of Paddock may call this")
        try:
            order = msgspec.json.decode(await request.read(), type=FreezeRequest)
            await freeze(order.pod_uid, frozen=order.frozen)
        except (msgspec.DecodeError, RecursionError) as error:
            return web.Response(status=400, text=str(error))
        except NotFoundError as error:
            return web.Response(status=404, text=error.message)
        except PaddockError as error:
            return web.Response(status=503, text=error.message)
        return web.Response(status=204)

    app = web.Application(client_max_size=4096)
    app.add_routes([web.get("/healthz", alive), web.post("/freeze", freeze_pod)])
    return app


@contextlib.asynccontextmanager
async def serving(
    tokens: tuple[str, ...], host: str, port: int = names.NODE_PORT
) -> AsyncGenerator[None]:
    """Serve while the context is open."""
    runner = web.AppRunner(create_app(*tokens), access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        yield
    finally:
        await runner.cleanup()


async def run(settings: Settings, stop: asyncio.Event, on_ready: Callable[[], None]) -> None:
    """Serve until `stop` is set."""
    seed = token_seed(load_or_create(settings))
    async with serving(node_tokens(seed), settings.api_host):
        on_ready()
        await stop.wait()
