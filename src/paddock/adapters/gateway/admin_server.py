"""The admin server of a gateway: health, metrics, traffic, and routes from peers.

It is not for clients.
"""

import contextlib
from collections.abc import AsyncGenerator, Mapping

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler
from msgspec import Struct

from paddock.adapters.membership import base_url
from paddock.gateway.activity import Activity
from paddock.gateway.routing.peers import MAX_BODY_BYTES, PATH, PAUSE_PATH, PeerEndpoint
from paddock.gateway.routing.routes import RouteTable
from paddock.kit import metrics
from paddock.kit.clock import Clock
from paddock.kit.errors import UnauthenticatedError


class ActivityCounts(Struct, frozen=True):
    """`GET /activity`: which sandboxes had traffic through this gateway."""

    up_seconds: float
    """How long the gateway has been counting."""
    seen: Mapping[str, float]
    """How many seconds ago each was active, by uid."""


def create_app(
    routes: RouteTable, activity: Activity, endpoint: PeerEndpoint, clock: Clock
) -> web.Application:
    """Return the application."""
    started = clock.monotonic()

    async def alive(_request: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def ready(_request: web.Request) -> web.Response:
        body = msgspec.json.encode({"ready": routes.is_ready, "routes": len(routes)})
        return web.Response(
            body=body, status=200 if routes.is_ready else 503, content_type="application/json"
        )

    async def exposition(_request: web.Request) -> web.Response:
        return web.Response(body=metrics.exposition(), content_type="text/plain")

    async def traffic(_request: web.Request) -> web.Response:
        body = msgspec.json.encode(activity.by_sandbox())
        return web.Response(body=body, content_type="application/json")

    async def recent(request: web.Request) -> web.Response:
        within = float(request.query.get("within", "inf"))
        now = clock.monotonic()
        seen = activity.active_within(within, now)
        body = msgspec.json.encode(ActivityCounts(up_seconds=now - started, seen=seen))
        return web.Response(body=body, content_type="application/json")

    async def receive_routes(request: web.Request) -> web.Response:
        endpoint.receive_routes(request.headers, await request.read())
        return web.Response(status=204)

    async def receive_pause(request: web.Request) -> web.Response:
        routes = endpoint.receive_routes(request.headers, await request.read())
        # Applying the route has aborted what does not outlive the pause: the rest waits for a wake.
        waiting = sum(activity.in_flight(route.uid) for route in routes)
        return web.Response(body=msgspec.msgpack.encode(waiting))

    async def exchange_state(request: web.Request) -> web.Response:
        return web.Response(body=endpoint.serve_state(request.headers, await request.read()))

    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors])
    app.add_routes(
        [
            web.get("/healthz", alive),
            web.get("/readyz", ready),
            web.get("/metrics", exposition),
            web.get("/sandboxes", traffic),
            web.get("/activity", recent),
            web.post(PATH, receive_routes),
            web.put(PATH, exchange_state),
            web.post(PAUSE_PATH, receive_pause),
        ]
    )
    return app


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except UnauthenticatedError as error:
        return web.Response(status=401, text=error.message)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        return web.Response(status=400, text=f"the message cannot be decoded: {error}")


@contextlib.asynccontextmanager
async def serving(app: web.Application, host: str, port: int) -> AsyncGenerator[str]:
    """Serve beside the body; yield the URL."""
    runner = web.AppRunner(app, access_log=None, handle_signals=False)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
        bound: int = runner.addresses[0][1]
        yield base_url(host, bound)
    finally:
        await runner.cleanup()
