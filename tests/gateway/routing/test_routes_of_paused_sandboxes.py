"""What the route of a paused sandbox tells gateways about its processes."""

from datetime import UTC, datetime

import pytest

from paddock.cache.route_view import route_view
from paddock.gateway.routing.routes import route_of
from paddock.resources.kinds.sandbox import ClaimIdentity, Sandbox, SandboxSpec
from paddock.resources.kinds.template import PauseStrategy, SandboxTemplateSpec
from paddock.resources.meta import ObjectMeta

NOW = datetime(2030, 1, 1, tzinfo=UTC)
STOP, FREEZE = PauseStrategy.STOP, PauseStrategy.FREEZE


@pytest.mark.parametrize(
    ("of_sandbox", "of_template", "paused", "expected"),
    [
        pytest.param(STOP, FREEZE, True, True, id="a pause without memory"),
        pytest.param(None, STOP, True, True, id="the strategy of the template"),
        pytest.param(FREEZE, STOP, True, False, id="the sandbox has its own strategy"),
        pytest.param(None, FREEZE, True, False, id="the template keeps memory"),
        pytest.param(None, STOP, False, False, id="it runs"),
    ],
)
def test_a_route_shows_whether_the_pause_ends_the_processes(
    of_sandbox: PauseStrategy | None, of_template: PauseStrategy, paused: bool, expected: bool
) -> None:
    sandbox = Sandbox(
        metadata=ObjectMeta(name="abc", namespace="default", uid="uid", resource_version="7"),
        spec=SandboxSpec(
            template=SandboxTemplateSpec(pause_strategy=of_template),
            pause_strategy=of_sandbox,
            paused=paused,
            claim=ClaimIdentity(sandbox_id="abc", owner="team", lock="lock", claim_time=NOW),
        ),
    )
    for seen in (sandbox, route_view(sandbox)):
        route = route_of(seen, NOW)
        assert route is not None
        assert route.loses_processes is expected
