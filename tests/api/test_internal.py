"""The control plane's API for gateways."""

import pytest

from paddock.claims.requests import NewSandbox
from paddock.resources.kinds.sandbox import Phase
from tests.scenario.paddock import CALLER, SECRETS, paddock

pytestmark = pytest.mark.looptime


async def test_a_wake_requires_the_matching_uid() -> None:
    async with paddock() as world:
        wanted = NewSandbox(template="base", auto_pause=True, auto_resume=True)
        made = await world.manager.claims.create(CALLER, wanted)
        assert made.spec.claim is not None
        sandbox_id = made.spec.claim.sandbox_id
        asleep = await world.manager.lifecycle.pause(CALLER, sandbox_id)

        async def woken(uid: str) -> int:
            body = {"id": sandbox_id, "uid": uid}
            headers = {"Authorization": f"Bearer {SECRETS.token}"}
            return (await world.http.post("/_paddock/wake", json=body, headers=headers)).status_code

        assert await woken("of a namesake") == 404
        found = world.provider.sandbox(asleep.key)
        assert found is not None
        assert found.status.phase is Phase.PAUSED
        assert await woken(asleep.metadata.uid) == 200
