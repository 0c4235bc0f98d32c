"""Requests that wait for their sandbox: bounded in number, in bytes and in time.

Each waits on its own; the waking is shared (`waker`). What is told when there is no waking says
nothing of how things are inside.
"""

import logging

from paddock.gateway.activity import Activity
from paddock.gateway.http import error_responses
from paddock.gateway.http.exchange import Exchange
from paddock.gateway.limits import GatewayLimits
from paddock.gateway.routing.routes import Route
from paddock.gateway.waking.waker import Waker
from paddock.kit.errors import (
    ConflictError,
    DeadlineExceededError,
    NotFoundError,
    PaddockError,
    QuotaExceededError,
)
from paddock.kit.logs import fields

log = logging.getLogger(__name__)


class HeldRequests:
    """Everything that waits in one gateway."""

    def __init__(self, waker: Waker, activity: Activity, limits: GatewayLimits) -> None:
        self._waker = waker
        self._activity = activity
        self._limits = limits
        self._by_uid: dict[str, set[Exchange]] = {}

    def has_room(self, uid: str) -> bool:
        """Say whether one more request may wait for this sandbox."""
        if self._activity.held >= self._limits.held_requests:
            return False
        if len(self._by_uid.get(uid, ())) >= self._limits.held_requests_per_sandbox:
            return False
        held = sum(item.held_bytes for group in self._by_uid.values() for item in group)
        return held < self._limits.held_bytes

    async def hold(self, exchange: Exchange, route: Route) -> Route | None:
        """Wait until the sandbox runs; `None` after the exchange was told why it does not."""
        group = self._by_uid.setdefault(route.uid, set())
        group.add(exchange)
        self._activity.held += 1
        try:
            return await self._waker.wake_once(route)
        except PaddockError as error:
            log.info("sandbox was not woken", extra=fields(sandbox=route.id, error=repr(error)))
            _refuse(exchange, error)
            return None
        finally:
            self._activity.held -= 1
            group.discard(exchange)
            if not group:
                self._by_uid.pop(route.uid, None)


def _refuse(exchange: Exchange, error: PaddockError) -> None:
    if isinstance(error, (NotFoundError, ConflictError)):
        exchange.fail(502, error_responses.NOT_FOUND)
    elif isinstance(error, QuotaExceededError):
        exchange.fail(429, "the sandbox cannot be resumed: its team's quota is used up")
    elif isinstance(error, DeadlineExceededError):
        exchange.fail(503, "the sandbox did not wake in time", retry_after_seconds=5)
    else:
        exchange.fail(503, "the sandbox could not be woken", retry_after_seconds=1)
