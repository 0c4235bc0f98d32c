"""The resources of a new installation: created once, and never again."""

import pytest

from paddock.app.wiring import default_resources
from paddock.kit.clock import LoopClock
from paddock.kit.errors import NotFoundError, UnavailableError
from paddock.resources.kinds.pool import SandboxPool
from paddock.resources.kinds.template import SandboxTemplate
from paddock.resources.meta import Key
from paddock.store.memory import MemoryStore
from tests.scenario.paddock import SECRETS, paddock

pytestmark = pytest.mark.looptime
BASE = Key("default", "base")


@pytest.mark.parametrize("kinds", [(SandboxPool,), (SandboxPool, SandboxTemplate)])
async def test_deleted_default_resources_stay_deleted_over_restarts(kinds) -> None:
    store = MemoryStore(clock=LoopClock())
    async with paddock(store=store) as world:
        await world.stocked(2)
        for kind in kinds:
            await store.delete(kind, BASE)
        await world.until(lambda: world.provider.get(SandboxPool, BASE) is None)
    for _ in range(2):
        async with paddock(store=store) as world:
            for kind in kinds:
                with pytest.raises(NotFoundError):
                    await store.get(kind, BASE)


async def test_a_deleted_default_pool_can_be_applied_again_and_then_stays() -> None:
    store = MemoryStore(clock=LoopClock())
    path = "/apis/paddock.dev/v1alpha1/namespaces/default/sandboxpools/base"
    body = {
        "apiVersion": "paddock.dev/v1alpha1",
        "kind": "SandboxPool",
        "metadata": {"name": "base", "namespace": "default"},
        "spec": {"templateRef": {"name": "base"}, "replicas": 3},
    }
    async with paddock(store=store) as world:
        await store.delete(SandboxPool, BASE)
    async with paddock(store=store) as world:
        applied = await world.http.patch(
            f"{path}?fieldManager=test",
            json=body,
            headers={
                "Content-Type": "application/apply-patch+yaml",
                "Authorization": f"Bearer {SECRETS.token}",
            },
        )
        assert applied.is_success, applied.text
        await world.stocked(3)
    async with paddock(store=store) as world:
        assert world.pool().spec.replicas == 3


class InterruptedStore(MemoryStore):
    """A store that fails when the number of creates reaches a limit."""

    creates_left = 0

    async def create(self, obj, **options):
        self.creates_left -= 1
        if self.creates_left == 0:
            raise UnavailableError("the process ends here")
        return await super().create(obj, **options)


@pytest.mark.parametrize("creates", range(2, 9))
async def test_a_start_that_is_interrupted_anywhere_is_completed_by_the_next(creates: int) -> None:
    store = InterruptedStore(clock=LoopClock())
    store.creates_left = creates
    with pytest.raises(UnavailableError):
        async with paddock(store=store):
            pass
    store.creates_left = 0
    async with paddock(store=store) as world:
        assert await store.get(SandboxTemplate, BASE)
        assert await store.get(SandboxPool, BASE)
        assert len(world.plane.keyring.listed()) == 1
        settings, keyring = world.plane.settings, world.plane.keyring
        await default_resources.ensure(store, keyring, settings, SECRETS.api_key)
        assert len(world.plane.keyring.listed()) == 1
