"""What a gateway asks of the control plane, and tells it."""

import asyncio
import logging

import aiohttp
import msgspec

from paddock.api.internal import PREFIX, Problem, Report, WakeBody
from paddock.gateway.routing.routes import Route, remote_route, route_of
from paddock.kit import bearer, errors
from paddock.kit.clock import Clock
from paddock.kit.errors import PaddockError, UnavailableError
from paddock.kit.logs import fields
from paddock.manager.federation.protocol import GATEWAY
from paddock.resources import codec
from paddock.resources.kinds.sandbox import Sandbox

log = logging.getLogger(__name__)

_REPORT_SECONDS = 5.0
_UNREADABLE = "the control plane gave an answer that cannot be read"


class ControlClient:
    """Speaks to the control plane."""

    def __init__(self, base: str, token: str, clock: Clock) -> None:
        self._base = base + PREFIX
        self._clock = clock
        self._session = aiohttp.ClientSession(headers=bearer.header(token))

    async def wake(self, route: Route) -> Route:
        """Resume a sandbox and give its new route."""
        return await self._route(
            "POST", "/wake", msgspec.json.encode(WakeBody(route.id, route.uid))
        )

    async def look(self, sandbox_id: str) -> Route:
        """Ask for a sandbox's route."""
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
            raise _error(data)
        try:
            sandbox = codec.decode(Sandbox, data)
        except errors.InvalidError as error:
            raise UnavailableError(
                "the control plane gave an answer that cannot be read"
            ) from error
        route = route_of(sandbox, self._clock.now())
        if route is None:
            raise errors.NotFoundError("the sandbox is nobody's now")
        return remote_route(route, gateway, self._clock.now()) if gateway else route

    async def report(self, report: Report) -> tuple[str, ...] | None:
        """Tell where this gateway is and which sandboxes had traffic; gives who else there is."""
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
        """Hang up."""
        await self._session.close()


def _error(data: bytes) -> PaddockError:
    try:
        problem = msgspec.json.decode(data, type=Problem)
    except msgspec.DecodeError:
        return UnavailableError(_UNREADABLE)
    kind = getattr(errors, problem.kind, None)
    if isinstance(kind, type) and issubclass(kind, PaddockError):
        return kind(problem.message)
    return UnavailableError(problem.message)
