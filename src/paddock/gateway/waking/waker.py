"""Wake paused sandboxes: once per sandbox, however many requests are held for it.

Wakes are fenced by uid: a new sandbox with the same name is never woken for requests to the old
one. A client that disconnects ends only its own wait. Transient errors (a control plane that
restarts, a pause in progress) are retried; permanent errors are raised at once.
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

ResumeCall = Callable[[Route], Awaitable[Route]]
"""Resumes a sandbox through the control plane and returns its new route."""

_RETRY_SECONDS = 5.0
"""How long a conflict or an unavailable control plane is retried."""
_RETRY_DELAY_SECONDS = 0.05
_WAKES = metrics.counter("paddock_gateway_wakes_total", "Sandboxes woken by traffic.", ("result",))
_SECONDS = metrics.histogram("paddock_gateway_wake_seconds", "Time to wake a paused sandbox.")


class Waker:
    """Wakes sandboxes for held requests."""

    def __init__(
        self,
        routes: RouteTable,
        resume: ResumeCall,
        tasks: asyncio.TaskGroup,
        activity: Activity,
        *,
        timeout_seconds: float,
    ) -> None:
        self._routes = routes
        self._resume = resume
        self._tasks = tasks
        self._activity = activity
        self._timeout = timeout_seconds
        self._wakes: dict[str, asyncio.Future[Route]] = {}
        self._changes: dict[str, asyncio.Event] = {}
        routes.on_change(self._changed)

    @property
    def in_flight(self) -> int:
        """The number of sandboxes being woken."""
        return len(self._wakes)

    async def wake_once(self, route: Route) -> Route:
        """Return the route of the sandbox once it runs; join a wake that is already in flight."""
        wake = self._wakes.get(route.uid)
        if wake is None:
            current = self._routes.get(route.id)
            if (
                current is not None
                and current.uid == route.uid
                and current.state is SandboxState.RUNNING
            ):
                # Woken since the caller read its route.
                return current
            wake = asyncio.get_running_loop().create_future()
            self._wakes[route.uid] = wake
            self._tasks.create_task(self._run_wake(route, wake), name=f"wake {route.id}")
        # Shielded: other callers still wait when this one is cancelled.
        return await asyncio.shield(wake)

    async def _run_wake(self, route: Route, wake: asyncio.Future[Route]) -> None:
        """Wake the sandbox and pass the result, or the error, to all waiting callers."""
        try:
            wake.set_result(await self._wake_in_time(route))
        except asyncio.CancelledError:
            wake.cancel()
            raise
        except Exception as error:
            if not isinstance(error, PaddockError):
                log.exception("waking failed", extra=fields(sandbox=route.id))
            wake.set_exception(error)
            # Marks the exception as retrieved: there may be no waiting caller left.
            wake.exception()
        finally:
            self._wakes.pop(route.uid, None)

    def _changed(self, old: Route | None, new: Route | None) -> None:
        for route in (old, new):
            if route is not None and (event := self._changes.get(route.uid)) is not None:
                event.set()

    async def _wake_in_time(self, route: Route) -> Route:
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            async with asyncio.timeout(self._timeout):
                if route.state is SandboxState.CREATING:
                    return await self._wait_until_created(route)
                woken = await self._resume_until_running(route)
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
        if (traffic := self._activity.get(route.uid)) is not None:
            traffic.wakes += 1
        return woken

    async def _resume_until_running(self, route: Route) -> Route:
        loop = asyncio.get_running_loop()
        until = loop.time() + _RETRY_SECONDS
        while True:
            try:
                woken = await self._resume(route)
            except (ConflictError, UnavailableError):
                self._require_current(route)
                if loop.time() >= until:
                    raise
            else:
                if woken.uid != route.uid:
                    raise NotFoundError("the sandbox was replaced by another")
                self._routes.put(woken)
                current = self._require_current(route)
                if current.state is SandboxState.RUNNING:
                    return current
            await asyncio.sleep(_RETRY_DELAY_SECONDS)

    async def _wait_until_created(self, route: Route) -> Route:
        event = self._changes.setdefault(route.uid, asyncio.Event())
        try:
            while (current := self._require_current(route)).state is SandboxState.CREATING:
                event.clear()
                await event.wait()
            return current
        finally:
            self._changes.pop(route.uid, None)

    def _require_current(self, route: Route) -> Route:
        current = self._routes.get(route.id)
        if current is None or current.uid != route.uid:
            raise NotFoundError("the sandbox is gone")
        return current
