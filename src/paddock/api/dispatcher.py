"""Dispatch of requests to the control plane's applications, by path.

The declarative API uses Kubernetes' paths; operators, gateways, other clusters and clients of
MCP have their own; everything else is E2B's API.
"""

from starlette.types import ASGIApp, Receive, Scope, Send

KUBE_PREFIXES = ("/api/", "/apis/", "/openapi/", "/version/", "/livez/")
OPS_PREFIXES = ("/metrics/", "/healthz/", "/readyz/")
INTERNAL_PREFIX = "/_paddock/"
FEDERATION_PREFIX = "/_federation/"
MCP_PATH = "/mcp/"


class Dispatcher:
    """Dispatches each request to the application that serves its path."""

    def __init__(
        self,
        *,
        e2b: ASGIApp,
        kube: ASGIApp,
        ops: ASGIApp,
        internal: ASGIApp,
        mcp: ASGIApp,
        federation: ASGIApp | None = None,
    ) -> None:
        self._internal = internal
        self._federation = federation
        self._e2b = e2b
        self._kube = kube
        self._mcp = mcp
        self._ops = ops

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "lifespan":
            return
        path = scope["path"] + "/"
        if path.startswith(KUBE_PREFIXES):
            await self._kube(scope, receive, send)
        elif path.startswith(OPS_PREFIXES):
            await self._ops(scope, receive, send)
        elif path.startswith(INTERNAL_PREFIX):
            await self._internal(scope, receive, send)
        elif path == MCP_PATH:
            await self._mcp(scope, receive, send)
        elif self._federation is not None and path.startswith(FEDERATION_PREFIX):
            await self._federation(scope, receive, send)
        else:
            await self._e2b(scope, receive, send)
