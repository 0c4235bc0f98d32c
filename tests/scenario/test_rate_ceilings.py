"""Rates of templates and of the installation are ceilings for sandboxes of both APIs."""

import pytest

from paddock.resources.kinds.sandbox import Phase, Sandbox, SandboxSpec
from paddock.resources.kinds.template import (
    Resources,
    SandboxTemplate,
    SandboxTemplateSpec,
    TemplateRef,
)
from paddock.resources.meta import Key, ObjectMeta
from paddock.runtime.port import Limits
from tests.scenario.paddock import World, paddock

pytestmark = pytest.mark.looptime

MEGA = 1_000_000
SLOW = Resources(ingress_bandwidth="8M", io_write_iops=100)


async def a_slow_template(world: World) -> None:
    spec = SandboxTemplateSpec(resources=SLOW)
    metadata = ObjectMeta(name="slow", namespace="default")
    await world.store.create(SandboxTemplate(metadata=metadata, spec=spec))
    await world.until(lambda: world.provider.get(SandboxTemplate, Key("default", "slow")))


def limits_of(world: World, sandbox: Sandbox) -> Limits:
    return world.runtime.blueprint(sandbox.metadata.uid).limits


async def test_a_sandbox_of_the_e2b_api_has_the_rates_of_its_template() -> None:
    async with paddock() as world:
        await a_slow_template(world)
        made = await world.http.post("/v2/sandboxes", json={"templateID": "slow", "timeout": 60})
        made.raise_for_status()
        uid = made.json()["sandboxID"]
        sandbox = world.provider.claimed_sandbox(uid)
        assert sandbox is not None
        limits = limits_of(world, sandbox)
        assert (limits.ingress_bandwidth, limits.io_write_iops) == (8 * MEGA, 100)
        shown = (await world.http.get(f"/sandboxes/{uid}/network")).raise_for_status().json()
        assert (shown["ingressBandwidth"], shown["egressBandwidth"]) == (8 * MEGA, 500 * MEGA)
        rates = {
            part["source"]: (part.get("ingressBandwidth"), part.get("egressBandwidth"))
            for part in shown["parts"]
        }
        assert rates["installation"] == (500 * MEGA, 500 * MEGA)
        assert rates["template"] == (8 * MEGA, None)


async def test_a_sandbox_of_the_declarative_api_cannot_exceed_its_template() -> None:
    own = Resources(ingress_bandwidth="1G", egress_bandwidth="2M", io_write_iops=5000)
    async with paddock() as world:
        await a_slow_template(world)
        spec = SandboxSpec(template_ref=TemplateRef(name="slow"), resources=own)
        key = Key("default", "greedy")
        metadata = ObjectMeta(name=key.name, namespace=key.namespace)
        await world.store.create(Sandbox(metadata=metadata, spec=spec))

        def runs() -> bool:
            found = world.provider.get(Sandbox, key)
            return found is not None and found.status.phase is Phase.RUNNING

        await world.until(runs)
        sandbox = world.provider.get(Sandbox, key)
        assert sandbox is not None
        limits = limits_of(world, sandbox)
        assert (limits.ingress_bandwidth, limits.egress_bandwidth) == (8 * MEGA, 2 * MEGA)
        assert limits.io_write_iops == 100
