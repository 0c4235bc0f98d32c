"""Traffic of sandboxes as gateways report it to their control plane."""

from datetime import datetime, timedelta

from paddock.api.internal import GatewayReport
from paddock.kit.clock import Clock


class ActivityReports:
    """When each sandbox last had traffic, by uid."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since = clock.now()
        self._last: dict[str, datetime] = {}

    def observe(self, report: GatewayReport) -> None:
        """Record the traffic that a gateway reports."""
        now = self._clock.now()
        for uid, seconds in report.seen.items():
            active = now - timedelta(seconds=seconds)
            self._last[uid] = max(active, self._last.get(uid, active))

    def since(self) -> datetime:
        """Return the time since which all traffic is known."""
        return self._since

    def last(self, uid: str) -> datetime | None:
        """Return when a sandbox last had traffic."""
        return self._last.get(uid)

    def forget(self, uid: str) -> None:
        """Drop a deleted sandbox."""
        self._last.pop(uid, None)

    async def refresh(self) -> None:
        """Do nothing: gateways push their reports."""
