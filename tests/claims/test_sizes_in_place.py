"""Claims with another size: a warm sandbox is resized if possible, else one is created."""

import pytest
from msgspec import structs

from paddock.adapters.runtime_agent import RuntimeAgent
from paddock.claims.requests import NewSandbox
from paddock.kit.errors import UnsupportedError
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.kinds.template import Resources
from tests.scenario.paddock import CALLER, World, paddock, resizing

pytestmark = pytest.mark.looptime

SMALLER = NewSandbox(template="base", resources=Resources(cpu="500m"))


async def claimed(world: World) -> tuple[set[str], Sandbox]:
    """Claim a smaller sandbox; return the uids of the stock, and the sandbox."""
    await world.stocked(2)
    stock = {sandbox.metadata.uid for sandbox in world.provider.all(Sandbox)}
    return stock, await world.manager.claims.create(CALLER, SMALLER)


@pytest.fixture
def resized(monkeypatch: pytest.MonkeyPatch) -> list[Resources]:
    return resizing(monkeypatch)


async def test_a_warm_sandbox_is_resized_if_the_runtime_can(resized: list[Resources]) -> None:
    async with paddock(pool_size=2) as world:
        stock, sandbox = await claimed(world)
        assert sandbox.metadata.uid in stock
        assert [size.cpu for size in resized] == ["500m"]
        assert sandbox.spec.resources == resized[0]


async def test_a_sandbox_is_created_if_the_runtime_cannot_resize() -> None:
    async with paddock(pool_size=2) as world:
        stock, sandbox = await claimed(world)
        assert sandbox.metadata.uid not in stock
        assert sandbox.spec.resources is not None
        assert sandbox.spec.resources.cpu == "500m"


async def test_a_refused_resize_costs_a_warm_sandbox_but_not_the_claim(
    resized: list[Resources], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(_self, sandbox, _template):
        raise UnsupportedError(f"the node of {sandbox.key} is too old")

    monkeypatch.setattr(RuntimeAgent, "resize", refuse)
    async with paddock(pool_size=2) as world:
        stock, sandbox = await claimed(world)
        assert sandbox.metadata.uid not in stock
        owned = world.provider.sandboxes(CALLER.team)
        assert [item.metadata.uid for item in owned] == [sandbox.metadata.uid], "nothing is left"


async def test_the_same_request_again_finds_the_same_sandbox_and_its_size(
    resized: list[Resources],
) -> None:
    async with paddock(pool_size=2) as world:
        await world.stocked(2)
        wanted = structs.replace(SMALLER, idempotency_key="once")
        first = await world.manager.claims.create(CALLER, wanted)
        again = await world.manager.claims.create(CALLER, wanted)
        assert again.metadata.uid == first.metadata.uid
        assert len(resized) == 2, "whoever was cut off before the resize gets it now"
