"""The number of store writes per claim."""

from collections import Counter
from typing import Any

import pytest

from paddock.claims.requests import NewSandbox
from paddock.store.memory import MemoryStore
from tests.scenario.paddock import CALLER, paddock

pytestmark = pytest.mark.looptime


class CountingStore(MemoryStore):
    """Counts writes by verb and by the name of the object."""

    def __init__(self) -> None:
        super().__init__()
        self.written: Counter[tuple[str, str]] = Counter()

    async def create(self, obj: Any, **options: Any) -> Any:
        made = await super().create(obj, **options)
        self.written["create", made.metadata.name] += 1
        return made

    async def update(self, obj: Any, **options: Any) -> Any:
        self.written["update", obj.metadata.name] += 1
        return await super().update(obj, **options)

    async def update_status(self, obj: Any, **options: Any) -> Any:
        self.written["update_status", obj.metadata.name] += 1
        return await super().update_status(obj, **options)


@pytest.mark.parametrize(
    ("stock", "verbs"), [(1, ["update"]), (0, ["create", "update_status"])], ids=["warm", "cold"]
)
async def test_a_claim_is_one_write_and_a_new_sandbox_one_more(
    stock: int, verbs: list[str]
) -> None:
    store = CountingStore()
    async with paddock(pool_size=stock, store=store) as world:
        await world.stocked(stock)
        store.written.clear()
        made = await world.manager.claims.create(CALLER, NewSandbox(template="base"))
        name = made.metadata.name
        assert sorted(verb for verb, what in store.written.elements() if what == name) == verbs
