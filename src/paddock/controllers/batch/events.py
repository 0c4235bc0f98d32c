"""Which changes enqueue a batch, and which enqueue a pool for the allocator."""

from collections.abc import Callable, Iterable
from functools import partial

from paddock.cache.pool_members import PoolMembers
from paddock.cache.provider import Provider
from paddock.controllers.batch.allocation.pool_selector import ANY
from paddock.engine.controller import Controller, own_key
from paddock.resources.kinds.batch import BatchSandbox
from paddock.resources.kinds.pool import SandboxPool
from paddock.resources.kinds.sandbox import LABEL_BATCH, Sandbox
from paddock.resources.meta import Key

GATHER_SECONDS = 0.05
"""Events of many sandboxes of one batch or pool within this time lead to one reconcile."""


def batch_of_sandbox(pool_members: PoolMembers, sandbox: Sandbox) -> Key | None:
    """Return the batch that holds a sandbox, by allocation or by label; `None` without one."""
    if (holder := pool_members.holder(sandbox.key)) is not None:
        return holder
    name = sandbox.metadata.labels.get(LABEL_BATCH)
    return Key(sandbox.metadata.namespace, name) if name else None


def batches_of_pool(
    provider: Provider, old: SandboxPool | None, new: SandboxPool | None
) -> list[Key]:
    """Return the batches that may use a pool which was created, deleted, or got another spec."""
    pool = new or old
    is_relevant = old is None or new is None or old.metadata.generation != new.metadata.generation
    if pool is None or not is_relevant or not provider.is_synced:
        return []
    references = (pool.key, Key(pool.metadata.namespace, ANY))
    return [batch.key for key in references for batch in provider.batches_of_pool(key)]


def pools_of_batch(old: BatchSandbox | None, new: BatchSandbox | None) -> Iterable[Key]:
    """Return the pools that serve a batch, before and after its change."""
    found: set[Key] = set()
    for batch in (old, new):
        if batch is None:
            continue
        name = batch.status.pool or batch.spec.pool_ref
        if name and name != ANY:
            namespace, _, last = name.rpartition("/")
            found.add(Key(namespace or batch.metadata.namespace, last))
    return found


def enqueue_gathered(controller: Controller[Key]) -> Callable[[Key], None]:
    """Return a listener that enqueues a key after `GATHER_SECONDS`."""
    return lambda key: controller.queue.add_after(key, GATHER_SECONDS)


def subscribe(
    batches: Controller[Key],
    allocator: Controller[Key],
    provider: Provider,
    pool_members: PoolMembers,
) -> None:
    """Enqueue batches for their controller and pools for the allocator."""
    enqueue = enqueue_gathered(batches)

    def sandbox_changed(old: Sandbox | None, new: Sandbox | None) -> None:
        sandbox = new or old
        if sandbox is not None and (batch := batch_of_sandbox(pool_members, sandbox)) is not None:
            enqueue(batch)

    batches.watches(provider.informer(BatchSandbox), own_key)
    provider.informer(Sandbox).subscribe(sandbox_changed)
    batches.watches(provider.informer(SandboxPool), partial(batches_of_pool, provider))
    allocator.watches(provider.informer(BatchSandbox), pools_of_batch)
    allocator.watches(provider.informer(SandboxPool), own_key)
    pool_members.on_change(enqueue_gathered(allocator))
