"""Default limits of a gateway."""

from paddock.gateway.limits import GatewayLimits
from paddock.settings import Settings


def test_default_limits_are_as_documented() -> None:
    limits = GatewayLimits()
    assert (limits.held_requests_per_sandbox, limits.held_requests) == (256, 1_000)
    assert limits.held_bytes == 32 * 1024 * 1024
    assert (limits.requests_per_sandbox, limits.requests_reserved) == (2_000, 200)
    assert limits.connections == 20_000
    assert limits.pause_grace_seconds == 1
    assert limits.boot_seconds == 10
    assert Settings().wake_timeout_seconds == 60
