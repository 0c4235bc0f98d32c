"""Which changes enqueue a checkpoint: its own, and those of the sandbox that it stores."""

from functools import partial

from paddock.cache.provider import Provider
from paddock.engine.controller import Controller, own_key
from paddock.resources.kinds.checkpoint import Checkpoint
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.meta import Key


def checkpoints_of_sandbox(
    provider: Provider, old: Sandbox | None, new: Sandbox | None
) -> list[Key]:
    """Return the checkpoints of a changed sandbox."""
    sandbox = new or old
    if sandbox is None or not provider.is_synced:
        return []
    return [item.key for item in provider.checkpoints_of_sandbox(sandbox.key)]


def subscribe(controller: Controller[Key], provider: Provider) -> None:
    """Enqueue checkpoints."""
    controller.watches(provider.informer(Checkpoint), own_key)
    controller.watches(provider.informer(Sandbox), partial(checkpoints_of_sandbox, provider))
