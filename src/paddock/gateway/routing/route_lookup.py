"""Fetch routes from the control plane that the route table lacks or has outdated.

A safety net: routes are announced before their sandbox is handed out, and watched after that.
One request per sandbox at a time, few at once, and absence is cached for a moment, so that
clients that guess ids cannot overload the control plane.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from paddock.gateway.routing.routes import Route, RouteTable
from paddock.kit.clock import Clock
from paddock.kit.errors import NotFoundError, PaddockError, UnavailableError
from paddock.kit.logs import fields

log = logging.getLogger(__name__)

FetchRoute = Callable[[str], Awaitable[Route]]
"""Fetches a route from the control plane by sandbox id; raises `NotFoundError` if there is none."""

ABSENT_SECONDS = 1.0
_MAX_ABSENT = 4096
_MAX_CONCURRENT = 16
_TIMEOUT_SECONDS = 5.0
_RETRY_DELAY_SECONDS = 0.1


class RouteLookup:
    """Looks up routes that the table lacks."""

    def __init__(
        self, routes: RouteTable, fetch: FetchRoute, clock: Clock, tasks: asyncio.TaskGroup
    ) -> None:
        self._routes = routes
        self._fetch = fetch
        self._clock = clock
        self._tasks = tasks
        self._flights: dict[str, asyncio.Task[bool]] = {}
        self._absent_until: OrderedDict[str, float] = OrderedDict()

    def is_known_absent(self, sandbox_id: str) -> bool:
        """Whether a recent lookup found nothing new, so that another is pointless."""
        until = self._absent_until.get(sandbox_id)
        return until is not None and until > self._clock.monotonic()

    async def find(self, sandbox_id: str) -> Route | None:
        """Return the control plane's current route; None if there is none.

        Raises `UnavailableError` if the control plane does not answer or too many lookups are in
        flight, and the table never had a route.
        """
        flight = self._flights.get(sandbox_id)
        if flight is None:
            if len(self._flights) >= _MAX_CONCURRENT:
                return self._from_table(sandbox_id, "too many sandboxes are being looked up")
            flight = self._tasks.create_task(
                self._refresh(sandbox_id), name=f"look up {sandbox_id}"
            )
            self._flights[sandbox_id] = flight
            flight.add_done_callback(lambda _: self._flights.pop(sandbox_id, None))
        if await asyncio.shield(flight):
            return self._routes.get(sandbox_id)
        return self._from_table(sandbox_id, "the control plane does not answer")

    def _from_table(self, sandbox_id: str, problem: str) -> Route | None:
        """Fall back to the table. A sandbox that it never had may still exist: that is an error."""
        route = self._routes.get(sandbox_id)
        if route is None and not self._routes.has_ended(sandbox_id):
            raise UnavailableError(f"{problem}, try again")
        return route

    async def _refresh(self, sandbox_id: str) -> bool:
        """Update the table; return whether the control plane answered."""
        before = self._routes.get(sandbox_id)
        try:
            async with asyncio.timeout(_TIMEOUT_SECONDS):
                route = await self._fetch_with_retries(sandbox_id)
        except NotFoundError:
            self._remember_absent(sandbox_id)
        except TimeoutError:
            # Nothing is cached, and the table stays as it is.
            return False
        else:
            self._routes.put(route)
            if before is not None and self._routes.get(sandbox_id) is before:
                self._remember_absent(sandbox_id)
        return True

    async def _fetch_with_retries(self, sandbox_id: str) -> Route:
        """Fetch, with retries while the control plane is unavailable, for example restarting."""
        while True:
            try:
                return await self._fetch(sandbox_id)
            except NotFoundError:
                raise
            except PaddockError as error:
                log.info("lookup failed", extra=fields(sandbox=sandbox_id, error=repr(error)))
            await asyncio.sleep(_RETRY_DELAY_SECONDS)

    def _remember_absent(self, sandbox_id: str) -> None:
        self._absent_until[sandbox_id] = self._clock.monotonic() + ABSENT_SECONDS
        self._absent_until.move_to_end(sandbox_id)
        while len(self._absent_until) > _MAX_ABSENT:
            self._absent_until.popitem(last=False)
