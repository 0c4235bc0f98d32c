"""Records of Paddock are in the namespace it is installed in."""

import pytest

from paddock.app.wiring.manager import own_records
from paddock.cache.provider import KINDS, Provider
from paddock.claims.caller import Caller
from paddock.claims.idempotency import IdempotencyKeys
from paddock.claims.quota.ledger import Dimension, Footprint, Ledger, Quota, QuotaLimit, QuotaScope
from paddock.claims.quota.share_manager import ShareManager
from paddock.kit.clock import LoopClock
from paddock.kit.tasks import background
from paddock.manager.keys import Keyring
from paddock.resources.kinds.builtin import Lease, Secret
from paddock.store.memory import MemoryStore

pytestmark = pytest.mark.looptime


async def test_keys_shares_and_idempotency_keys_are_in_the_namespace_of_the_installation() -> None:
    clock = LoopClock()
    store = MemoryStore(clock=clock)
    provider = Provider(
        store, kinds=(*KINDS, Secret, Lease), filters=own_records("elsewhere"), clock=clock
    )
    keyring, ledger = Keyring(store, clock, "elsewhere"), Ledger("one")
    provider.informer(Secret).subscribe(keyring.observe)
    reservations = ShareManager(ledger, keyring, provider, clock)
    idempotency_keys = IdempotencyKeys(store, provider, clock, ledger.account, "elsewhere")
    async with background(provider.serve(), name="cache"):
        await provider.wait_synced()
        await keyring.set_team_quota(
            "team", Quota((QuotaLimit(Dimension.COUNT, QuotaScope.ALL, 2),))
        )
        key, _ = await keyring.create(name="somebody", team="team")
        caller = Caller("team", key.id, key.role)
        await reservations.reserve(caller, "box", Footprint(1000, 1024))
        await idempotency_keys.acquire("team", "once", "asked", seconds=5)

        records = [
            *(await store.list(Secret)).items,
            *(await store.list(Lease)).items,
        ]
        assert sorted(record.KIND for record in records) == ["Lease", "Lease", "Secret", "Secret"]
        assert {record.metadata.namespace for record in records} == {"elsewhere"}
        await keyring.revoke(key.id)
        assert len((await store.list(Secret)).items) == 1
