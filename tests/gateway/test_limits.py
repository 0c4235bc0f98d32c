"""How much a gateway holds and serves where nobody says otherwise."""

from paddock.gateway.limits import GatewayLimits
from paddock.settings import Settings


def test_what_a_gateway_holds_and_serves_is_bounded_as_promised() -> None:
    limits = GatewayLimits()
    assert (limits.held_requests_per_sandbox, limits.held_requests) == (256, 1_000)
    assert limits.held_bytes == 32 * 1024 * 1024
    assert (limits.requests_per_sandbox, limits.requests_reserved) == (2_000, 200)
    assert limits.connections == 20_000
    assert limits.pause_grace_seconds == 1
    assert Settings().wake_timeout_seconds == 60
