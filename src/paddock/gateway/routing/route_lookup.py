"""Asking the control plane about a sandbox that the route table does not know, or not yet so.

A safety net: routes are announced before their sandbox is handed out, and watched after that.
One question per sandbox at a time, few at once, and an answer of "no" is remembered for a
moment, so that strangers who guess ids cannot keep the control plane busy.
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
"""Asks the control plane for a route by sandbox id; `NotFoundError` where there is none."""

ABSENT_SECONDS = 1.0
_MAX_ABSENT = 4096
_MAX_CONCURRENT = 16
_TIMEOUT_SECONDS = 5.0
_RETRY_DELAY_SECONDS = 0.1


class RouteLookup:
    """Looks sandboxes up where the table falls short."""

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
        """Say whether asking again so soon is pointless."""
        until = self._absent_until.get(sandbox_id)
        return until is not None and until > self._clock.monotonic()

    async def find(self, sandbox_id: str) -> Route | None:
        """Give the route as the control plane has it now; `None` where there is none.

        `UnavailableError` where nobody knows: it does not answer, or too many ask it already, and
        the table never had a route.
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
        """Go by what is known here. Unknown is not absent: who was never heard of may be there."""
        route = self._routes.get(sandbox_id)
        if route is None and not self._routes.has_ended(sandbox_id):
            raise UnavailableError(f"{problem}, try again")
        return route

    async def _refresh(self, sandbox_id: str) -> bool:
        """Bring the table up to date; says whether the control plane answered."""
        before = self._routes.get(sandbox_id)
        try:
            async with asyncio.timeout(_TIMEOUT_SECONDS):
                route = await self._fetch_with_retries(sandbox_id)
        except NotFoundError:
            self._remember_absent(sandbox_id)
        except TimeoutError:
            # Nothing is remembered, and the table's word stands.
            return False
        else:
            self._routes.put(route)
            if before is not None and self._routes.get(sandbox_id) is before:
                self._remember_absent(sandbox_id)
        return True

    async def _fetch_with_retries(self, sandbox_id: str) -> Route:
        """Ask again while nobody answers: a control plane that restarts is back in a moment."""
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
