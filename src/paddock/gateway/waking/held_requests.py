"""Requests held until their sandbox runs: bounded in number, bytes and time.

All requests for one sandbox share one wake (`waker`). Error responses reveal no internals.
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
    """All held requests of one gateway."""

    def __init__(self, waker: Waker, activity: Activity, limits: GatewayLimits) -> None:
        self._waker = waker
        self._activity = activity
        self._limits = limits
        self._by_uid: dict[str, set[Exchange]] = {}

    def has_room(self, uid: str) -> bool:
        """Whether one more request may be held for this sandbox."""
        if self._activity.held >= self._limits.held_requests:
            return False
        if len(self._by_uid.get(uid, ())) >= self._limits.held_requests_per_sandbox:
            return False
        held = sum(item.held_bytes for group in self._by_uid.values() for item in group)
        return held < self._limits.held_bytes

    async def hold(self, exchange: Exchange, route: Route) -> Route | None:
        """Hold a request until its sandbox runs; return the new route.

        Returns None if the sandbox was not woken; the exchange has failed then.
        """
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
        exchange.fail(
            429,
            "the sandbox cannot be resumed: its team's quota is used up",
            retry_after_seconds=5,
        )
    elif isinstance(error, DeadlineExceededError):
        exchange.fail(503, "the sandbox did not wake in time", retry_after_seconds=5)
    else:
        exchange.fail(503, "the sandbox could not be woken", retry_after_seconds=1)
