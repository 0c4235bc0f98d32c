"""Which changes enqueue a pool: its spec, its template, its members, and demand for it."""

from collections.abc import Callable
from functools import partial

from paddock.cache.pool_members import PoolMembers
from paddock.cache.provider import Provider
from paddock.controllers.pool.controller import PoolController
from paddock.engine.controller import Controller, own_key
from paddock.resources.kinds.pool import SandboxPool
from paddock.resources.kinds.template import SandboxTemplate
from paddock.resources.meta import Key


def pools_of_template(
    provider: Provider, old: SandboxTemplate | None, new: SandboxTemplate | None
) -> list[Key]:
    """Return the pools that use a changed template."""
    template = new or old
    if template is None or not provider.is_synced:
        return []
    return [pool.key for pool in provider.pools_of_template(template.metadata.name)]


def subscribe(
    controller: Controller[Key],
    provider: Provider,
    pool_members: PoolMembers,
    pools: PoolController,
    on_demand: Callable[[Callable[[Key], None]], None],
) -> None:
    """Enqueue pools; `on_demand` registers a listener for changed demand of batches."""
    controller.watches(provider.informer(SandboxPool), own_key)
    controller.watches(provider.informer(SandboxTemplate), partial(pools_of_template, provider))
    pool_members.on_change(lambda key: controller.queue.add_after(key, pools.requeue_delay(key)))
    on_demand(controller.queue.add)
