"""Health, readiness and metrics endpoints, for operators."""

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from paddock.cache.provider import Provider
from paddock.kit import metrics


def create_app(provider: Provider) -> Starlette:
    """Return the application."""

    async def alive(_request: Request) -> Response:
        return PlainTextResponse("ok")

    async def ready(_request: Request) -> Response:
        problems = provider.problems()
        body = msgspec.json.encode({"ready": not problems, "problems": problems})
        return Response(body, 503 if problems else 200, media_type="application/json")

    async def exposition(_request: Request) -> Response:
        return Response(metrics.exposition(), media_type="text/plain; version=0.0.4")

    return Starlette(
        routes=[
            Route("/healthz", alive),
            Route("/readyz", ready),
            Route("/metrics", exposition),
        ]
    )
