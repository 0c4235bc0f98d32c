"""Claims that name an image: allowed by settings, otherwise refused with a reason."""

import pytest

from paddock.claims.requests import NewSandbox
from paddock.kit.errors import ForbiddenError
from paddock.resources.kinds.sandbox import Sandbox
from tests.scenario.paddock import CALLER, paddock

pytestmark = pytest.mark.looptime

KEY = "e2b.agents.kruise.io/image"


async def test_a_sandbox_is_created_from_an_allowed_image() -> None:
    async with paddock(pool_size=2, claim_images="other/*, team/tool:*") as world:
        await world.stocked(2)
        stock = {sandbox.metadata.uid for sandbox in world.provider.all(Sandbox)}
        body = {"templateID": "base", "metadata": {KEY: "team/tool:7", "mine": "stays"}}
        answer = await world.http.post("/v2/sandboxes", json=body)
        assert answer.status_code == 201, answer.text
        found = world.provider.claimed_sandbox(answer.json()["sandboxID"])
        assert found is not None
        assert found.metadata.uid not in stock
        assert found.spec.image == "team/tool:7"
        assert world.runtime.blueprint(found.metadata.uid).image == "team/tool:7"
        assert found.spec.claim is not None
        assert found.spec.claim.metadata == {"mine": "stays"}


@pytest.mark.parametrize("allowed", ["", "team/tool", "team/*-slim"])
async def test_other_images_are_refused_and_nothing_is_claimed(allowed: str) -> None:
    async with paddock(pool_size=1, claim_images=allowed) as world:
        await world.stocked(1)
        with pytest.raises(ForbiddenError, match="clients may not choose"):
            await world.manager.claims.create(CALLER, NewSandbox(template="base", image="host"))
        body = {"templateID": "base", "metadata": {KEY: "host"}}
        assert (await world.http.post("/v2/sandboxes", json=body)).status_code == 403
        assert not world.provider.sandboxes(CALLER.team)


async def test_an_empty_image_is_a_bad_request() -> None:
    async with paddock(claim_images="*") as world:
        body = {"templateID": "base", "metadata": {KEY: " "}}
        assert (await world.http.post("/v2/sandboxes", json=body)).status_code == 400
