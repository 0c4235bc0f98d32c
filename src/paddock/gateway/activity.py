"""Traffic counters, per sandbox and for this process: for metrics and for idle pauses.

Plain numbers, since every request updates them; they become Prometheus metrics only on collection.
"""

import math
from collections.abc import Iterable

from msgspec import Struct
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric


class SandboxTraffic(Struct):
    """One sandbox's traffic since the gateway started."""

    requests: int = 0
    errors: int = 0
    request_bytes: int = 0
    response_bytes: int = 0
    seconds: float = 0.0
    """Total of all its requests."""
    wakes: int = 0
    in_flight: int = 0
    last_active: float = 0.0
    """Monotonic time; while requests are in flight, the sandbox counts as active now."""


class Activity:
    """Traffic by sandbox uid."""

    def __init__(self) -> None:
        self._by_uid: dict[str, SandboxTraffic] = {}
        self._ids: dict[str, str] = {}
        self._drained_at = -math.inf
        self.statuses: dict[int, int] = {}
        """Responses of this process, by status."""
        self.connections = 0
        self.closed: dict[str, int] = {}
        """Connections that this process closed or refused, by reason."""
        self.held = 0

    def get(self, uid: str) -> SandboxTraffic | None:
        """Return a sandbox's traffic, or None if it had none."""
        return self._by_uid.get(uid)

    def in_flight(self, uid: str) -> int:
        """Return how many requests to a sandbox are in flight or held."""
        traffic = self._by_uid.get(uid)
        return traffic.in_flight if traffic is not None else 0

    def get_or_create(self, uid: str, sandbox_id: str) -> SandboxTraffic:
        """Return a sandbox's traffic; callers update its counters directly."""
        traffic = self._by_uid.get(uid)
        if traffic is None:
            traffic = self._by_uid[uid] = SandboxTraffic()
            self._ids[uid] = sandbox_id
        return traffic

    def count_response(self, status: int) -> None:
        self.statuses[status] = self.statuses.get(status, 0) + 1

    def forget(self, uid: str) -> None:
        """Drop the counters of a sandbox that no longer exists."""
        self._by_uid.pop(uid, None)
        self._ids.pop(uid, None)

    def by_sandbox(self) -> dict[str, SandboxTraffic]:
        """Return the traffic of all sandboxes, by sandbox id."""
        return {self._ids[uid]: traffic for uid, traffic in self._by_uid.items()}

    def drain(self, now: float) -> dict[str, float]:
        """Return the seconds since each sandbox was active, for those active since the last
        call."""
        since, self._drained_at = self._drained_at, now
        return {
            uid: 0.0 if traffic.in_flight else max(now - traffic.last_active, 0.0)
            for uid, traffic in self._by_uid.items()
            if traffic.in_flight or traffic.last_active >= since
        }

    def active_within(self, seconds: float, now: float) -> dict[str, float]:
        """Return the seconds since each sandbox was active, for those active within this time."""
        ages = {
            uid: 0.0 if traffic.in_flight else max(now - traffic.last_active, 0.0)
            for uid, traffic in self._by_uid.items()
        }
        return {uid: age for uid, age in ages.items() if age <= seconds}

    def collect(self) -> Iterable[Metric]:
        """Yield everything as Prometheus metric families."""
        responses = CounterMetricFamily(
            "paddock_gateway_requests",
            "Requests by status; 499: the client hung up.",
            labels=["status"],
        )
        for status, count in sorted(self.statuses.items()):
            responses.add_metric([str(status)], count)
        yield responses
        yield GaugeMetricFamily(
            "paddock_gateway_connections", "Connections from clients.", self.connections
        )
        closed = CounterMetricFamily(
            "paddock_gateway_connections_closed",
            "Connections closed as silent, evicted for others, or refused.",
            labels=["reason"],
        )
        for reason, count in sorted(self.closed.items()):
            closed.add_metric([reason], count)
        yield closed
        yield GaugeMetricFamily(
            "paddock_gateway_held_requests", "Requests held until their sandbox runs.", self.held
        )
        yield from self._families()

    def _families(self) -> Iterable[Metric]:
        for name, text, field in (
            ("requests", "Requests", "requests"),
            ("errors", "Responses of 500 and above", "errors"),
            ("request_bytes", "Bytes of bodies to the sandbox", "request_bytes"),
            ("response_bytes", "Bytes of bodies from the sandbox", "response_bytes"),
            ("request_seconds", "Seconds of all requests together", "seconds"),
            ("wakes", "Wakes by traffic", "wakes"),
        ):
            family = CounterMetricFamily(
                f"paddock_gateway_sandbox_{name}", f"{text}, by sandbox.", labels=["sandbox"]
            )
            for sandbox_id, traffic in self.by_sandbox().items():
                family.add_metric([sandbox_id], getattr(traffic, field))
            yield family
