"""Counts claims per pool for the autoscaler: forecast and quiet windows.

Counts between two reconciles are in memory. The rate and the time of the last claim are in the
pool's status, and claimed sandboxes have their claim time, so a restart loses very little.
"""

from datetime import datetime

from msgspec import structs

from paddock.cache.pool_members import pool_of
from paddock.controllers.env.formulas import decayed_rate
from paddock.resources.kinds.pool import AutoscalingState
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.meta import Key


class ClaimRate:
    """Counts claims from events of the Sandbox informer."""

    def __init__(self) -> None:
        self._claims: dict[Key, int] = {}
        self._last: dict[Key, datetime] = {}

    def observe(self, old: Sandbox | None, new: Sandbox | None) -> None:
        """Count a new claim; subscribed to the Sandbox informer."""
        if new is None or new.spec.claim is None:
            return
        pool = pool_of(new)
        if pool is None:
            return
        lock = old.spec.claim.lock if old is not None and old.spec.claim is not None else ""
        if lock == new.spec.claim.lock:
            return
        at = new.spec.claim.claim_time
        self._last[pool] = max(at, self._last.get(pool, at))
        if old is not None:
            # A claim from before this process started is already part of the rate.
            self._claims[pool] = self._claims.get(pool, 0) + 1

    def update(
        self, pool: Key, state: AutoscalingState, now: datetime, *, window_seconds: float
    ) -> AutoscalingState:
        """Return the state with new claims added, and reset the count."""
        rate = decayed_rate(
            state.claim_rate,
            state.claim_rate_time,
            self._claims.pop(pool, 0),
            now,
            window_seconds=window_seconds,
        )
        known = (item for item in (state.last_claim_time, self._last.get(pool)) if item)
        return structs.replace(
            state, claim_rate=rate, claim_rate_time=now, last_claim_time=max(known, default=None)
        )

    def forget(self, pool: Key) -> None:
        """Forget a deleted pool."""
        self._claims.pop(pool, None)
        self._last.pop(pool, None)


def is_worth_writing(old: AutoscalingState | None, new: AutoscalingState) -> bool:
    """Whether a state differs by more than the slow drift of its measurements."""
    if old is None:
        return True
    if _steady(old) != _steady(new):
        return True
    if (old.claim_rate == 0) != (new.claim_rate == 0):
        return True
    return abs(new.claim_rate - old.claim_rate) > 0.2 * max(old.claim_rate, new.claim_rate)


def _steady(state: AutoscalingState) -> AutoscalingState:
    return structs.replace(state, claim_rate=0.0, claim_rate_time=None, last_claim_time=None)
