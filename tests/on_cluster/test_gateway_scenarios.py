"""The gateway scenarios, unmodified, with two gateway processes on a real API server.

Requests go to the gateways in turn; sandboxes are pods. Scenarios about the internals of a gateway
process (limits, tables, counters) are not run here.
"""

import asyncio
import contextlib
import signal
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
import pytest_asyncio

from paddock.cache.states import SandboxState
from tests.cluster.control_plane import KubeCluster
from tests.gateway import test_access, test_faults_are_reported
from tests.gateway.http import test_messages_pass_unchanged
from tests.gateway.rig import recording
from tests.gateway.waking import test_traffic_wakes_sandboxes
from tests.on_cluster.world.adopted_scenarios import scenarios
from tests.on_cluster.world.installation import Installation
from tests.on_cluster.world.light_pods import OpenPodKubelet
from tests.on_cluster.world.traffic import ClusterRig, Traffic, rig_on

pytestmark = [
    pytest.mark.kubernetes,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]

MODULES = (
    test_messages_pass_unchanged,
    test_faults_are_reported,
    test_access,
    test_traffic_wakes_sandboxes,
)

LEFT_OUT = {
    r"rig\([^)]|paddock\.listen\b": "sets limits and switches of a gateway's own process",
    r"paddock\.(activity|gateway)\b": "looks at the counters and the memory of that process",
    r"paddock\.(routes|lookups|absences|elsewhere)\b|dialer\.targets": (
        "puts routes into its table, or says what a lookup gives, that no pod stands for"
    ),
    r"paddock\.(on_resume|clock|change)\b|dialer\.api_port": (
        "stands in for the control plane: says what waking does, and when"
    ),
    r"incarnation|state=SandboxState\.CREATING": "sets what pods do not keep",
}
"""Words of scenarios about the internals of one gateway, with the reason."""

globals().update(scenarios(MODULES, without={}, inside="|".join(LEFT_OUT)))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def traffic(own_cluster: KubeCluster) -> AsyncGenerator[Traffic]:
    """An installation with sandboxes for the traffic of scenarios."""
    async with contextlib.AsyncExitStack() as stack:
        paddock = await stack.enter_async_context(
            Installation(own_cluster.info, OpenPodKubelet, pool_size=0, lease_seconds=15)
        )
        await stack.enter_async_context(paddock.node_agent())
        made = Traffic(paddock)
        stack.push_async_callback(made.close)
        yield made


@pytest.fixture(autouse=True)
def on_a_cluster(traffic: Traffic, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the rig of the scenarios by this one."""

    def rig(*limits: Any, **settings: Any) -> AbstractAsyncContextManager[ClusterRig]:
        if limits or settings:
            pytest.skip("it sets limits of the gateway's process")
        return rig_on(traffic)

    for module in MODULES:
        monkeypatch.setattr(module, "rig", rig)


async def test_a_hundred_calls_through_both_gateways_wake_a_sandbox_once(traffic: Traffic) -> None:
    seen: list[Any] = []
    async with rig_on(traffic) as paddock:
        await paddock.upstream(recording(seen), "sleeper", state=SandboxState.PAUSED, wakes=True)
        answers = await asyncio.gather(
            *(paddock.get(f"/{number}", e2b_sandbox_id="sleeper") for number in range(100))
        )
        assert [answer.status for answer in answers] == [200] * 100
        assert sorted(line.split()[1] for line, _, _ in seen) == sorted(f"/{n}" for n in range(100))
        assert paddock.wakes == ["sleeper"]


async def test_a_killed_gateway_serves_its_sandboxes_again_after_a_restart(
    traffic: Traffic,
) -> None:
    seen: list[Any] = []
    async with rig_on(traffic) as paddock:
        await paddock.upstream(recording(seen))
        for number in range(2):
            await traffic.paddock.kill(f"gateway-{number}", signal.SIGKILL)
            try:
                other = traffic.paddock.gateway_ports[1 - number]
                reader, writer = await asyncio.open_connection("127.0.0.1", other)
                writer.write(b"GET / HTTP/1.1\r\nhost: x\r\ne2b-sandbox-id: abc\r\n"
                             b"e2b-sandbox-port: 8000\r\nconnection: close\r\n\r\n")  # fmt: skip
                assert (await reader.read()).startswith(b"HTTP/1.1 200")
                writer.close()
            finally:
                traffic.paddock.start("gateway", number)
            await traffic.paddock.serving(f"gateway-{number}")
        for _ in range(2):
            assert (await paddock.get()).status == 200
