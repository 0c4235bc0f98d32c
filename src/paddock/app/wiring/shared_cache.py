"""What every process of a cluster follows: the cache, and the books kept by what it tells.

One machine's control plane, which may be alone with its store, has its own in `control`.
"""

from typing import NamedTuple

from paddock.app.wiring.manager import own_records
from paddock.cache.pool_members import PoolMembers
from paddock.cache.provider import KINDS, Provider
from paddock.claims.quota.ledger import Ledger
from paddock.claims.quota.share_manager import Apportioned
from paddock.engine.informer import Filter
from paddock.kit import ids
from paddock.kit.clock import Clock
from paddock.manager.keys import Keyring
from paddock.resources.kinds.batch import BatchSandbox
from paddock.resources.kinds.builtin import Lease, Secret
from paddock.resources.kinds.sandbox import Sandbox
from paddock.settings import Settings
from paddock.store.port import Store


class Followed(NamedTuple):
    """The cache and its books."""

    provider: Provider
    pool_members: PoolMembers
    ledger: Ledger
    keyring: Keyring
    allowance: Apportioned


def follow(settings: Settings, store: Store, clock: Clock) -> Followed:
    """Wire them; they hear of everything once the provider runs."""
    home = settings.system_namespace
    only = Filter(namespace=settings.namespace or None)
    provider = Provider(
        store,
        kinds=(*KINDS, Secret, Lease),
        # Among our own records are quotas of teams: the admission of environments looks at them.
        filters={**dict.fromkeys(KINDS, only), **own_records(home)},
        clock=clock,
    )
    pool_members, ledger, keyring = (
        PoolMembers(),
        Ledger(ids.sandbox_id()),
        Keyring(store, clock, home),
    )
    provider.informer(Sandbox).subscribe(pool_members.observe)
    provider.informer(Sandbox).subscribe(ledger.observe)
    provider.informer(BatchSandbox).subscribe(pool_members.observe_batch)
    provider.informer(Secret).subscribe(keyring.observe)
    allowance = Apportioned(ledger, keyring, provider, clock)
    return Followed(provider, pool_members, ledger, keyring, allowance)
