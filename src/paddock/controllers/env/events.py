"""Which changes enqueue an environment: its spec, its pools, its template, and waiting claims."""

from collections.abc import Callable
from functools import partial

from msgspec import structs

from paddock.cache.indexes import TEMPLATE_ID
from paddock.cache.provider import Provider
from paddock.controllers.env.claim_rate import ClaimRate
from paddock.engine.controller import Controller, controlled_by, own_key
from paddock.resources.kinds.env import ObservedQueue, SandboxEnv
from paddock.resources.kinds.pool import SandboxPool
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.kinds.template import SandboxTemplate
from paddock.resources.meta import Key


def changed_env(old: SandboxEnv | None, new: SandboxEnv | None) -> tuple[Key, ...]:
    """Return the key of an environment, unless only the controller's own status changed.

    A queue that another process reports does count; the time of its report does not.
    """
    env = new if new is not None else old
    if env is None:
        return ()
    is_same = (
        old is not None
        and new is not None
        and old.metadata.generation == new.metadata.generation
        and old.metadata.uid == new.metadata.uid
        and old.is_deleting == new.is_deleting
        and _queues(old) == _queues(new)
    )
    return () if is_same else (env.key,)


def _queues(env: SandboxEnv) -> tuple[ObservedQueue, ...]:
    return tuple(structs.replace(item, time=None) for item in env.status.queues)


def envs_of_template(
    provider: Provider, old: SandboxTemplate | None, new: SandboxTemplate | None
) -> list[Key]:
    """Return the environments that use a changed template."""
    template = new or old
    if template is None or not provider.is_synced:
        return []
    name = template.metadata.name
    return [env.key for env in provider.by_index(SandboxEnv, TEMPLATE_ID, name)]


def subscribe(
    controller: Controller[Key],
    provider: Provider,
    claim_rate: ClaimRate,
    on_demand: Callable[[Callable[[Key], None]], None],
) -> None:
    """Enqueue environments; `on_demand` registers a listener for changed queues of claims."""
    provider.informer(Sandbox).subscribe(claim_rate.observe)
    controller.watches(provider.informer(SandboxEnv), changed_env)
    controller.watches(provider.informer(SandboxPool), controlled_by(SandboxEnv))
    controller.watches(provider.informer(SandboxTemplate), partial(envs_of_template, provider))
    on_demand(controller.queue.add)


def subscribe_adoption(controller: Controller[Key], provider: Provider) -> None:
    """Enqueue pools for adoption."""
    controller.watches(provider.informer(SandboxPool), own_key)
