"""Network policies of templates, teams and the installation are ceilings for every sandbox."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec import structs

from paddock.claims.caller import Caller
from paddock.claims.network.ceilings import NetworkCeilings
from paddock.kit.clock import LoopClock
from paddock.kit.errors import InvalidError
from paddock.resources.kinds.checkpoint import CheckpointPhase
from paddock.resources.kinds.claim import ClaimPhase, SandboxClaim, SandboxClaimSpec
from paddock.resources.kinds.pool import SandboxPool, SandboxPoolSpec
from paddock.resources.kinds.sandbox import Phase, Sandbox, SandboxSpec
from paddock.resources.kinds.template import (
    NetworkPolicy,
    SandboxTemplate,
    SandboxTemplateSpec,
    TemplateRef,
)
from paddock.resources.meta import Key, ObjectMeta
from paddock.resources.network.internet import PUBLIC_REGISTRIES, Internet
from paddock.runtime.blueprint import egress
from paddock.runtime.simulated import ALL_CAPABILITIES, SimulatedRuntime
from tests.scenario.paddock import World, paddock

pytestmark = pytest.mark.looptime

RULES = NetworkPolicy(
    allow_internet_access=False, allow_out=("pypi.org", "8.8.0.0/16"), allow_public_traffic=False
)
CREATED, FORBIDDEN = 201, 403


def in_default(name: str) -> ObjectMeta:
    return ObjectMeta(name=name, namespace="default")


async def a_closed_template(world: World, *, warm: int = 0) -> None:
    spec = SandboxTemplateSpec(network=RULES)
    await world.store.create(SandboxTemplate(metadata=in_default("closed"), spec=spec))
    await world.until(lambda: world.provider.get(SandboxTemplate, Key("default", "closed")))
    if warm:
        pool = SandboxPoolSpec(template_ref=TemplateRef(name="closed"), replicas=warm)
        await world.store.create(SandboxPool(metadata=in_default("closed"), spec=pool))
        await world.stocked(warm, "closed")


async def a_member(world: World) -> dict[str, str]:
    _, key = await world.plane.keyring.create(name="member", team="research")
    return {"X-API-Key": key}


async def create(world: World, headers: dict[str, str], **body: Any) -> httpx.Response:
    return await world.http.post(
        "/v2/sandboxes", json={"templateID": "closed", "timeout": 60, **body}, headers=headers
    )


def sandbox_of(world: World, body: dict[str, Any]) -> Sandbox:
    found = world.provider.claimed_sandbox(body["sandboxID"])
    assert found is not None
    return found


def is_closed(world: World, body: dict[str, Any]) -> bool:
    """Whether the runtime enforces the template's rules, and ports need the token."""
    sandbox = sandbox_of(world, body)
    claim = sandbox.spec.claim
    assert claim is not None
    return bool(
        world.runtime.egress(sandbox.metadata.uid) == egress(RULES)
        and claim.traffic_token_hash
        and body["trafficAccessToken"]
    )


@pytest.mark.parametrize("warm", [0, 1])
@pytest.mark.parametrize("extra", [{}, {"allow_internet_access": True}, {"network": {}}])
async def test_a_default_create_has_the_rules_of_its_template(
    warm: int, extra: dict[str, Any]
) -> None:
    async with paddock() as world:
        await a_closed_template(world, warm=warm)
        made = await create(world, await a_member(world), **extra)
        assert made.status_code == CREATED
        assert is_closed(world, made.json())


@pytest.mark.parametrize(
    ("extra", "field"),
    [
        ({"network": {"allowPublicTraffic": True}}, "network.allowPublicTraffic"),
        ({"network": {"allowOut": ["0.0.0.0/0"]}}, "network.allowOut[0]"),
        ({"network": {"allowOut": ["8.8.8.8", "1.1.1.1"]}}, "network.allowOut[1]"),
        ({"network": {"dnsServers": ["8.8.8.8"]}}, "network.dnsServers[0]"),
        (
            {"network": {"allowOut": ["evil.test"], "denyOut": ["0.0.0.0/0"]}},
            "network.allowOut[0]",
        ),
    ],
)
async def test_a_request_that_opens_more_than_its_template_is_refused_with_the_field(
    extra: dict[str, Any], field: str
) -> None:
    async with paddock() as world:
        await a_closed_template(world)
        headers = await a_member(world)
        refused = await create(world, headers, **extra)
        assert refused.status_code == FORBIDDEN
        assert field in refused.json()["message"]
        made = (await create(world, headers)).json()
        update = {"allow_internet_access": True}
        if "allowPublicTraffic" not in extra["network"]:
            update |= extra["network"]
        refused = await world.http.put(
            f"/sandboxes/{made['sandboxID']}/network", json=update, headers=headers
        )
        assert refused.status_code == FORBIDDEN
        assert "allow_internet_access" in refused.json()["message"] or field in refused.text
        assert is_closed(world, made)


async def test_a_sandbox_can_be_closed_further_and_opened_again_up_to_its_template() -> None:
    async with paddock() as world:
        await a_closed_template(world, warm=1)
        headers = await a_member(world)
        made = (await create(world, headers, allow_internet_access=False)).json()
        uid = sandbox_of(world, made).metadata.uid
        assert world.runtime.egress(uid).allow_out == ()
        path = f"/sandboxes/{made['sandboxID']}/network"
        (
            await world.http.put(path, json={"allowOut": ["8.8.8.8"]}, headers=headers)
        ).raise_for_status()
        assert set(world.runtime.egress(uid).allow_out) == {"pypi.org", "8.8.0.0/16", "8.8.8.8"}
        body = {"allowOut": ["8.8.8.8"], "denyOut": ["0.0.0.0/0"]}
        (await world.http.put(path, json=body, headers=headers)).raise_for_status()
        assert world.runtime.egress(uid).allow_out == ("8.8.8.8",)
        (await world.http.put(path, json={}, headers=headers)).raise_for_status()
        assert is_closed(world, made)


async def test_an_administrator_may_exceed_a_template() -> None:
    async with paddock() as world:
        await a_closed_template(world, warm=1)
        network = {"allowOut": ["1.1.1.1"], "allowPublicTraffic": True}
        made = await create(world, {}, network=network)
        assert made.status_code == CREATED
        sandbox = sandbox_of(world, made.json())
        assert "1.1.1.1" in world.runtime.egress(sandbox.metadata.uid).allow_out
        assert not world.runtime.egress(sandbox.metadata.uid).allow_internet
        assert made.json().get("trafficAccessToken") is None
        path = f"/sandboxes/{made.json()['sandboxID']}/network"
        (await world.http.put(path, json={"allow_internet_access": True})).raise_for_status()
        assert world.runtime.egress(sandbox.metadata.uid).allow_internet
        # The next one of the pool is closed again.
        await world.stocked(1, "closed")
        assert is_closed(world, (await create(world, {})).json())


@pytest.mark.parametrize("extra", [{}, {"allow_internet_access": True}])
async def test_a_sandbox_from_a_snapshot_or_fork_keeps_the_rules_of_its_source(
    extra: dict[str, Any],
) -> None:
    own = NetworkPolicy(allow_internet_access=False, allow_public_traffic=False)
    async with paddock() as world:
        headers = await a_member(world)
        closing = {"allow_internet_access": False, "network": {"allowPublicTraffic": False}}
        source = (await create(world, headers, templateID="base", **closing)).json()
        path = f"/sandboxes/{source['sandboxID']}"
        stored = await world.http.post(f"{path}/snapshots", json={"name": "s"}, headers=headers)
        forked = await world.http.post(f"{path}/fork", json={"timeout": 60}, headers=headers)
        bodies = [forked.json()[0]["sandbox"]]
        for template in ("s", stored.json()["snapshotID"]):
            made = await create(world, headers, **{**extra, "templateID": template})
            bodies.append(made.json())
        for body in bodies:
            uid = sandbox_of(world, body).metadata.uid
            assert world.runtime.egress(uid) == egress(own)
            assert body["trafficAccessToken"]


async def test_a_resumed_sandbox_keeps_its_rules() -> None:
    async with paddock() as world:
        await a_closed_template(world)
        headers = await a_member(world)
        made = (await create(world, headers, allow_internet_access=False)).json()
        uid = sandbox_of(world, made).metadata.uid
        path = f"/sandboxes/{made['sandboxID']}"
        for memory in (True, False):
            paused = await world.http.post(
                f"{path}/pause", json={"memory": memory}, headers=headers
            )
            paused.raise_for_status()
            (await world.http.post(f"{path}/connect", json={}, headers=headers)).raise_for_status()
            assert world.runtime.egress(uid).allow_out == ()
            claim = sandbox_of(world, made).spec.claim
            assert claim is not None
            assert claim.traffic_token_hash


async def test_a_declared_sandbox_does_not_exceed_the_template_that_it_references() -> None:
    async with paddock() as world:
        await a_closed_template(world)
        spec = SandboxSpec(
            template_ref=TemplateRef(name="closed"),
            network=NetworkPolicy(allow_out=("8.8.8.8", "1.1.1.1")),
        )
        made = await world.store.create(Sandbox(metadata=in_default("mine"), spec=spec))
        await world.until(lambda: world.provider.sandbox(made.key).status.phase is Phase.RUNNING)
        allowed = world.runtime.egress(made.metadata.uid)
        assert not allowed.allow_internet
        assert set(allowed.allow_out) == {"pypi.org", "8.8.0.0/16", "8.8.8.8"}


async def test_a_declared_sandbox_from_a_checkpoint_keeps_the_rules_of_its_source() -> None:
    async with paddock() as world:
        headers = await a_member(world)
        made = await create(world, headers, templateID="base", allow_internet_access=False)
        sandbox = sandbox_of(world, made.json())
        stored = await world.manager.snapshots.create(
            Caller("research"), made.json()["sandboxID"], name=None
        )
        assert stored.status.phase is CheckpointPhase.SUCCEEDED
        spec = SandboxSpec(restore_from=stored.status.checkpoint_id)
        clone = await world.store.create(
            Sandbox(
                metadata=ObjectMeta(name="clone", namespace=sandbox.metadata.namespace), spec=spec
            )
        )
        await world.until(lambda: world.provider.sandbox(clone.key).status.phase is Phase.RUNNING)
        assert not world.runtime.egress(clone.metadata.uid).allow_internet


@pytest.mark.parametrize("warm", [0, 1])
async def test_a_sandbox_claim_has_private_ports_if_its_template_says_so(warm: int) -> None:
    async with paddock() as world:
        await a_closed_template(world, warm=warm)
        spec = SandboxClaimSpec(template_name="closed", replicas=1, create_on_no_stock=True)
        claim = await world.store.create(SandboxClaim(metadata=in_default("c"), spec=spec))

        def done() -> bool:
            found = world.provider.get(SandboxClaim, claim.key)
            return found is not None and found.status.phase is ClaimPhase.COMPLETED

        await world.until(done)
        (sandbox,) = world.provider.sandboxes("default")
        assert sandbox.spec.claim is not None
        assert sandbox.spec.claim.traffic_token_hash
        assert world.runtime.egress(sandbox.metadata.uid) == egress(RULES)


# ---- teams and the installation ----------------------------------------------------------


def reached(world: World, body: dict[str, Any]) -> tuple[bool, tuple[str, ...]]:
    policy = world.runtime.egress(sandbox_of(world, body).metadata.uid)
    return policy.allow_internet, policy.allow_out


OPEN_ACCESS = (True, ())
REGISTRIES = (False, tuple(sorted(PUBLIC_REGISTRIES)))
NO_ACCESS: tuple[bool, tuple[str, ...]] = (False, ())


@pytest.mark.parametrize("pool_size", [0, 1])
@pytest.mark.parametrize("extra", [{}, {"allow_internet_access": True}])
@pytest.mark.parametrize(
    ("installation", "team", "expected"),
    [
        ("open", None, OPEN_ACCESS),
        ("closed", None, NO_ACCESS),
        ("registries", None, REGISTRIES),
        ("open", "closed", NO_ACCESS),
        ("open", "registries", REGISTRIES),
        ("closed", "open", OPEN_ACCESS),
        ("registries", "closed", NO_ACCESS),
    ],
)
async def test_a_sandbox_reaches_what_its_team_allows_when_the_create_returns(
    installation: str,
    team: str | None,
    expected: tuple[bool, tuple[str, ...]],
    extra: dict[str, Any],
    pool_size: int,
) -> None:
    async with paddock(pool_size=pool_size, sandbox_internet=installation) as world:
        await world.stocked(pool_size)
        headers = await a_member(world)
        if team is not None:
            changed = await world.http.patch("/teams/research", json={"internet": team})
            assert changed.json()["internet"] == team
        made = await create(world, headers, **{**extra, "templateID": "base"})
        assert made.status_code == CREATED
        is_open, allowed = reached(world, made.json())
        assert (is_open, tuple(sorted(allowed))) == expected


async def test_mirrors_of_the_installation_replace_the_public_registries() -> None:
    mirrors = {
        "sandbox_pip_index": "https://user:secret@mirror.example/simple",
        "sandbox_apt_mirror": "http://10.1.2.3:8080",
    }
    async with paddock(sandbox_internet="registries", **mirrors) as world:
        made = await create(world, await a_member(world), templateID="base")
        assert set(reached(world, made.json())[1]) == {"mirror.example", "10.1.2.3"}


async def test_nobody_exceeds_the_policy_of_the_team_but_templates_may_be_narrower() -> None:
    async with paddock(sandbox_internet="registries") as world:
        await a_closed_template(world)
        headers = await a_member(world)
        made = (await create(world, headers)).json()
        assert reached(world, made) == (False, ("pypi.org",))
        wider = {"allowOut": ["8.8.8.8"], "denyOut": ["0.0.0.0/0"]}
        for who in (headers, {}):
            refused = await create(world, who, templateID="base", network=wider)
            assert refused.status_code == FORBIDDEN
            assert "network.allowOut[0]" in refused.json()["message"]
            path = f"/sandboxes/{made['sandboxID']}/network"
            refused = await world.http.put(path, json=wider, headers=who)
            assert refused.status_code == FORBIDDEN


async def test_a_changed_policy_of_a_team_reaches_its_running_sandboxes() -> None:
    async with paddock() as world:
        made = (await create(world, await a_member(world), templateID="base")).json()
        other = (await create(world, {}, templateID="base")).json()
        assert reached(world, made) == OPEN_ACCESS
        await world.http.patch("/teams/research", json={"internet": "closed"})
        await world.until(lambda: reached(world, made) == NO_ACCESS)
        assert reached(world, other) == OPEN_ACCESS
        await world.http.patch("/teams/research", json={"internet": None})
        await world.until(lambda: reached(world, made) == OPEN_ACCESS)


async def test_only_an_administrator_changes_the_internet_of_a_team() -> None:
    async with paddock() as world:
        headers = await a_member(world)
        body = {"internet": "open"}
        refused = await world.http.patch("/teams/research", json=body, headers=headers)
        assert refused.status_code == FORBIDDEN


async def test_a_quota_and_the_internet_of_a_team_are_kept_apart() -> None:
    quota = {"limits": [{"dimension": "sandbox.count", "scope": "all", "limit": 3}]}
    async with paddock() as world:
        await world.http.patch("/teams/research", json={"quota": quota})
        await world.http.patch("/teams/research", json={"internet": "closed"})
        (team,) = [
            item for item in (await world.http.get("/teams")).json() if item["name"] == "research"
        ]
        assert (team["quota"], team["internet"]) == (quota, "closed")


async def test_the_policy_in_effect_is_shown_with_its_parts() -> None:
    async with paddock(sandbox_internet="registries") as world:
        await a_closed_template(world)
        headers = await a_member(world)
        body = {"network": {"denyOut": ["9.9.9.9"]}}
        made = (await create(world, headers, **body)).json()
        path = f"/sandboxes/{made['sandboxID']}/network"
        shown = (await world.http.get(path, headers=headers)).json()
        assert shown["network"]["allowOut"] == ["pypi.org"]
        assert not shown["allowInternetAccess"]
        assert [part["source"] for part in shown["parts"]] == [
            "installation",
            "template",
            "sandbox",
        ]
        assert shown["parts"][0]["internet"] == "registries"
        assert shown["parts"][2]["network"]["denyOut"] == ["9.9.9.9"]
        await world.http.patch("/teams/research", json={"internet": "closed"})
        shown = (await world.http.get(path, headers=headers)).json()
        assert shown["parts"][0] == {"source": "team", "internet": "closed"}
        detail = (await world.http.get(f"/sandboxes/{made['sandboxID']}", headers=headers)).json()
        assert not detail["allowInternetAccess"]
        assert detail["network"].get("allowOut", []) == []


async def test_a_node_without_a_network_serves_under_a_closed_internet() -> None:
    clock = LoopClock()
    capabilities = structs.replace(ALL_CAPABILITIES, can_filter_egress=False)
    runtime = SimulatedRuntime(clock=clock, capabilities=capabilities)
    async with paddock(clock=clock, runtime=runtime, sandbox_internet="closed") as world:
        await world.stocked(2)
        made = await create(world, await a_member(world), templateID="base")
        assert made.status_code == CREATED
        path = f"/sandboxes/{made.json()['sandboxID']}"
        (await world.http.post(f"{path}/pause", json={})).raise_for_status()
        (await world.http.post(f"{path}/connect", json={})).raise_for_status()


def test_registries_need_addresses_where_the_runtime_cannot_filter_names() -> None:
    for mirrors in ((), ("mirror.example",)):
        with pytest.raises(InvalidError, match="sandbox_internet"):
            NetworkCeilings(
                Internet.REGISTRIES, lambda _: None, mirrors=mirrors, needs_addresses=True
            )
    ceilings = NetworkCeilings(
        Internet.REGISTRIES, lambda _: None, mirrors=("10.1.2.3",), needs_addresses=True
    )
    assert ceilings.of("any") is not None


def test_the_documented_list_of_registries_is_complete() -> None:
    page = Path("docs/how-to/company-networks.md").read_text()
    assert [host for host in PUBLIC_REGISTRIES if host not in page] == []
