"""The client with which a gateway calls the control plane."""

import asyncio
import logging

import aiohttp
import msgspec

from paddock.adapters.remote_errors import error_from
from paddock.api.internal import PREFIX, GatewayReport, WakeBody
from paddock.gateway.routing.routes import Route, remote_route, route_of
from paddock.kit import bearer, errors
from paddock.kit.clock import Clock
from paddock.kit.errors import UnavailableError
from paddock.kit.logs import fields
from paddock.manager.federation.protocol import GATEWAY
from paddock.resources import codec
from paddock.resources.kinds.sandbox import Sandbox

log = logging.getLogger(__name__)

_REPORT_SECONDS = 5.0
_SENDER = "the control plane"


class ControlClient:
    """Calls the internal API of the control plane."""

    def __init__(self, base: str, token: str, clock: Clock) -> None:
        self._base = base + PREFIX
        self._clock = clock
        self._session = aiohttp.ClientSession(headers=bearer.header(token))

    async def resume(self, route: Route) -> Route:
        """Resume a sandbox; return its new route."""
        return await self._route(
            "POST", "/wake", msgspec.json.encode(WakeBody(route.id, route.uid))
        )

    async def fetch_route(self, sandbox_id: str) -> Route:
        """Return a sandbox's route."""
        return await self._route("GET", f"/sandboxes/{sandbox_id}", None)

    async def _route(self, method: str, path: str, body: bytes | None) -> Route:
        try:
            async with self._session.request(method, self._base + path, data=body) as response:
                data = await response.read()
                status = response.status
                gateway = response.headers.get(GATEWAY, "")
        except aiohttp.ClientError as error:
            raise UnavailableError("the control plane does not answer") from error
        if status != 200:
            raise error_from(data, _SENDER)
        try:
            sandbox = codec.decode(Sandbox, data)
        except errors.InvalidError as error:
            raise UnavailableError(f"{_SENDER} sent a response that cannot be decoded") from error
        route = route_of(sandbox, self._clock.now())
        if route is None:
            raise errors.NotFoundError("the sandbox is not claimed")
        return remote_route(route, gateway, self._clock.now()) if gateway else route

    async def report(self, report: GatewayReport) -> tuple[str, ...] | None:
        """Report this gateway's address and traffic; return all gateways, or None on failure."""
        try:
            async with (
                asyncio.timeout(_REPORT_SECONDS),
                self._session.post(
                    f"{self._base}/activity", data=msgspec.json.encode(report)
                ) as response,
            ):
                data = await response.read()
                status = response.status
        except (aiohttp.ClientError, TimeoutError) as error:
            log.debug("activity was not reported", extra=fields(error=repr(error)))
            return None
        if status != 200:
            return None
        return msgspec.json.decode(data, type=tuple[str, ...])

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()
