"""The time after a reboot in which a sandbox's servers may still be starting.

A sandbox that was paused with Stop keeps only its files: when it is resumed, its processes start
again. A request that woke it finds its port closed for a moment and waits instead of failing.
"""

from collections.abc import Callable

from paddock.cache.states import SandboxState
from paddock.gateway.routing.routes import Route, RouteTable


class RecentReboots:
    """The sandboxes that were rebooted a moment ago."""

    def __init__(self, routes: RouteTable, now: Callable[[], float], *, seconds: float) -> None:
        self._routes = routes
        self._now = now
        self._seconds = seconds
        self._until: dict[str, float] = {}
        """By sandbox uid."""
        routes.on_change(self._route_changed)

    def has_booted(self, route: Route) -> bool:
        """Whether this incarnation of the sandbox was seen to begin by a reboot, and still runs."""
        current = self._routes.get(route.id)
        return (
            route.uid in self._until
            and current is not None
            and current.uid == route.uid
            and current.incarnation == route.incarnation
            and current.state is SandboxState.RUNNING
        )

    def may_open_port(self, route: Route) -> bool:
        """Whether a closed port of the sandbox may open soon."""
        return self.has_booted(route) and self._now() < self._until[route.uid]

    def _route_changed(self, old: Route | None, new: Route | None) -> None:
        if old is None:
            return
        if new is None or new.uid != old.uid:
            self._until.pop(old.uid, None)
        elif new.incarnation != old.incarnation:
            if new.is_rebooted:
                self._until[new.uid] = self._now() + self._seconds
            else:
                self._until.pop(new.uid, None)
