"""What a runtime cannot do is shown in the status, with the reason and the next step."""

import pytest

from paddock.claims.requests import NewSandbox
from paddock.controllers.sandbox.pauses import REASON_PAUSE_UNSUPPORTED
from paddock.kit.errors import UnsupportedError
from paddock.resources.kinds.sandbox import (
    CONDITION_PAUSED,
    CONDITION_READY,
    Phase,
    Sandbox,
    SandboxSpec,
)
from paddock.resources.kinds.template import SandboxTemplateSpec
from paddock.resources.meta import ObjectMeta, condition
from paddock.runtime.simulated import Operation
from tests.scenario.paddock import CALLER, paddock

pytestmark = pytest.mark.looptime

REASON, ALTERNATIVE = "NetworkPolicies support addresses only", "use addresses or CIDRs"
TEXT = f"{REASON}; {ALTERNATIVE}"


async def test_a_sandbox_that_cannot_be_made_fails_with_both() -> None:
    async with paddock(pool_size=0) as world:
        world.runtime.fail_next(Operation.CREATE, UnsupportedError(REASON, hint=ALTERNATIVE))
        made = await world.store.create(
            Sandbox(
                metadata=ObjectMeta(name="x", namespace="default"),
                spec=SandboxSpec(template=SandboxTemplateSpec(image="base")),
            )
        )

        def found() -> Sandbox:
            sandbox = world.provider.sandbox(made.key)
            assert sandbox is not None
            return sandbox

        await world.until(lambda: found().status.phase is Phase.FAILED)
        ready = condition(found().status.conditions, CONDITION_READY)
        assert ready is not None
        assert found().status.message == ready.message == TEXT


async def test_a_pause_that_the_runtime_lacks_is_refused_with_both() -> None:
    async with paddock(pool_size=0) as world:
        sandbox = await world.manager.claims.create(CALLER, NewSandbox(template="base"))
        assert sandbox.spec.claim is not None
        for operation in (Operation.FREEZE, Operation.HIBERNATE):
            world.runtime.fail_next(operation, UnsupportedError(REASON, hint=ALTERNATIVE))
        with pytest.raises(UnsupportedError, match=TEXT):
            await world.manager.lifecycle.pause(CALLER, sandbox.spec.claim.sandbox_id)
        kept = world.provider.sandbox(sandbox.key)
        assert kept is not None
        shown = condition(kept.status.conditions, CONDITION_PAUSED)
        assert shown is not None
        assert (shown.reason, shown.message) == (REASON_PAUSE_UNSUPPORTED, TEXT)
        assert kept.status.phase is Phase.RUNNING
