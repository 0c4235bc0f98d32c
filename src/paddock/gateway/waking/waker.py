"""Waking paused sandboxes: once per sandbox, however many requests wait for it.

The waker is fenced by uid: a namesake that was made meanwhile is never woken for requests that
were meant for another. A caller that hangs up stops only its own waiting. What passes by itself
(a control plane that restarts, a pause that is just being finished) is tried again; what is
final is told at once.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from paddock.cache.states import SandboxState
from paddock.gateway.activity import Activity
from paddock.gateway.routing.routes import Route, RouteTable
from paddock.kit import metrics
from paddock.kit.errors import (
    ConflictError,
    DeadlineExceededError,
    NotFoundError,
    PaddockError,
    UnavailableError,
)
from paddock.kit.logs import fields

log = logging.getLogger(__name__)

Wake = Callable[[Route], Awaitable[Route]]
"""Resumes a sandbox through the manager and gives its new route; handed in by the application."""

_PASSING_SECONDS = 5.0
"""How long a conflict or an absent control plane is taken for something that passes."""
_AGAIN_SECONDS = 0.05
_WAKES = metrics.counter("paddock_gateway_wakes_total", "Sandboxes woken by traffic.", ("result",))
_SECONDS = metrics.histogram("paddock_gateway_wake_seconds", "From asleep to answering.")


class Waker:
    """Wakes sandboxes that requests wait for."""

    def __init__(
        self,
        routes: RouteTable,
        wake: Wake,
        tasks: asyncio.TaskGroup,
        activity: Activity,
        *,
        timeout_seconds: float,
    ) -> None:
        self._routes = routes
        self._wake = wake
        self._tasks = tasks
        self._activity = activity
        self._timeout = timeout_seconds
        self._flights: dict[str, asyncio.Future[Route]] = {}
        self._changes: dict[str, asyncio.Event] = {}
        routes.on_change(self._changed)

    @property
    def under_way(self) -> int:
        """How many sandboxes are being woken."""
        return len(self._flights)

    async def running(self, route: Route) -> Route:
        """Give the route of this very sandbox once it runs."""
        flight = self._flights.get(route.uid)
        if flight is None:
            current = self._routes.get(route.id)
            if (
                current is not None
                and current.uid == route.uid
                and current.state is SandboxState.RUNNING
            ):
                # Woken between the look that found it asleep and this one: that was its waking.
                return current
            flight = asyncio.get_running_loop().create_future()
            self._flights[route.uid] = flight
            self._tasks.create_task(self._fly(route, flight), name=f"wake {route.id}")
        # Shielded: the others still wait when this caller goes.
        return await asyncio.shield(flight)

    async def _fly(self, route: Route, flight: asyncio.Future[Route]) -> None:
        """Wake, and tell all who wait; no failure goes beyond them."""
        try:
            flight.set_result(await self._running(route))
        except asyncio.CancelledError:
            flight.cancel()
            raise
        except Exception as error:
            if not isinstance(error, PaddockError):
                log.exception("waking failed", extra=fields(sandbox=route.id))
            flight.set_exception(error)
            # Perhaps nobody is left to hear of it.
            flight.exception()
        finally:
            self._flights.pop(route.uid, None)

    def _changed(self, old: Route | None, new: Route | None) -> None:
        for route in (old, new):
            if route is not None and (event := self._changes.get(route.uid)) is not None:
                event.set()

    async def _running(self, route: Route) -> Route:
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            async with asyncio.timeout(self._timeout):
                if route.state is SandboxState.CREATING:
                    return await self._until_made(route)
                woken = await self._until_woken(route)
        except TimeoutError as error:
            _WAKES.labels("timeout").inc()
            raise DeadlineExceededError(
                f"the sandbox did not wake within {self._timeout:g} s"
            ) from error
        except Exception:
            _WAKES.labels("error").inc()
            raise
        _WAKES.labels("done").inc()
        _SECONDS.observe(loop.time() - started)
        if (traffic := self._activity.of(route.uid)) is not None:
            traffic.wakes += 1
        return woken

    async def _until_woken(self, route: Route) -> Route:
        loop = asyncio.get_running_loop()
        until = loop.time() + _PASSING_SECONDS
        while True:
            try:
                woken = await self._wake(route)
            except (ConflictError, UnavailableError):
                self._still_there(route)
                if loop.time() >= until:
                    raise
            else:
                if woken.uid != route.uid:
                    raise NotFoundError("the sandbox was replaced by another")
                self._routes.put(woken)
                current = self._still_there(route)
                if current.state is SandboxState.RUNNING:
                    return current
            await asyncio.sleep(_AGAIN_SECONDS)

    async def _until_made(self, route: Route) -> Route:
        event = self._changes.setdefault(route.uid, asyncio.Event())
        try:
            while (current := self._still_there(route)).state is SandboxState.CREATING:
                event.clear()
                await event.wait()
            return current
        finally:
            self._changes.pop(route.uid, None)

    def _still_there(self, route: Route) -> Route:
        current = self._routes.get(route.id)
        if current is None or current.uid != route.uid:
            raise NotFoundError("the sandbox is gone")
        return current
