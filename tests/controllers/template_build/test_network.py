"""What the sandbox of a build reaches, and through which proxies, certificates and mirrors."""

from pathlib import Path

import pytest

from paddock.resources.kinds.template import NetworkPolicy, Outbound
from paddock.resources.kinds.template_build import TemplateBuild
from paddock.resources.network.internet import PUBLIC_REGISTRIES
from paddock.runtime.port import Blueprint
from tests.controllers.template_build.shell import FakeShell, Reply
from tests.controllers.template_build.test_builds import Factory, in_a_world
from tests.scenario.paddock import paddock

pytestmark = pytest.mark.looptime
OUTBOUND = Outbound(
    http_proxy="http://proxy.example:3128", pip_index="https://mirror.example/simple/"
)


async def blueprint_of(factory: Factory, **spec: object) -> tuple[TemplateBuild, Blueprint]:
    """Start a build, and return what its sandbox was made of."""
    shell, runtime = factory.shell, factory.world.runtime
    before = len(shell.texts)
    shell.script({"slow": Reply(seconds=900)})
    build = await factory.start("slow", **spec)
    await factory.world.until(lambda: "slow" in shell.texts[before:])
    [box] = factory.sandboxes()
    return build, runtime.blueprint(box.metadata.uid)


@pytest.mark.parametrize(
    ("installation", "team", "is_open", "allowed"),
    [
        ("closed", None, False, set()),
        ("registries", None, False, set(PUBLIC_REGISTRIES)),
        ("open", "closed", False, set()),
        ("closed", "open", True, set()),
    ],
)
async def test_a_build_reaches_what_its_team_allows(
    tmp_path: Path, installation: str, team: str | None, is_open: bool, allowed: set[str]
) -> None:
    shell = FakeShell()
    async with paddock(
        pool_size=0, build_shell=shell, state_dir=str(tmp_path), sandbox_internet=installation
    ) as world:
        if team is not None:
            changed = await world.http.patch("/teams/default", json={"internet": team})
            assert changed.json()["internet"] == team
        factory = Factory(world, shell)
        # A template that allows all raises no ceiling.
        await factory.template(network=NetworkPolicy(allow_private_networks=True))
        _, used = await blueprint_of(factory)
        assert (used.egress.allow_internet, set(used.egress.allow_out)) == (is_open, allowed)


@in_a_world
async def test_a_build_uses_the_proxies_and_mirrors_of_its_template(factory: Factory) -> None:
    await factory.template("proxied", outbound=OUTBOUND)
    _, used = await blueprint_of(factory, template="proxied")
    assert used.agent.outbound.http_proxy == OUTBOUND.http_proxy
    assert used.agent.outbound.pip_index == OUTBOUND.pip_index


@in_a_world
async def test_a_build_uses_those_of_its_base_where_its_template_has_none(
    factory: Factory,
) -> None:
    await factory.template("proxied", outbound=OUTBOUND)
    _, used = await blueprint_of(factory, from_image="", from_template="proxied")
    assert used.agent.outbound.http_proxy == OUTBOUND.http_proxy
