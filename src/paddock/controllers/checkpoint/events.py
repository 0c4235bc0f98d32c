"""Which changes enqueue a checkpoint: its own, and those of the sandbox that it stores."""

from functools import partial

from paddock.cache import indexes
from paddock.cache.provider import Provider
from paddock.engine.controller import Controller, own_key
from paddock.resources.kinds.checkpoint import Checkpoint
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.kinds.template import SandboxTemplate
from paddock.resources.meta import Key


def checkpoints_of_sandbox(
    provider: Provider, old: Sandbox | None, new: Sandbox | None
) -> list[Key]:
    """Return the checkpoints of a changed sandbox."""
    sandbox = new or old
    if sandbox is None or not provider.is_synced:
        return []
    return [item.key for item in provider.checkpoints_of_sandbox(sandbox.key)]


def checkpoints_of_template(
    provider: Provider, old: SandboxTemplate | None, _new: SandboxTemplate | None
) -> list[Key]:
    """Return the checkpoints that a template started from before it changed."""
    if old is None or not old.spec.restore_from or not provider.is_synced:
        return []
    found = provider.view(Checkpoint, indexes.CHECKPOINT_ID, old.spec.restore_from)
    return [item.key for item in found if item.is_deleting]


def subscribe(controller: Controller[Key], provider: Provider) -> None:
    """Enqueue checkpoints."""
    controller.watches(provider.informer(Checkpoint), own_key)
    templates = provider.informer(SandboxTemplate)
    controller.watches(templates, partial(checkpoints_of_template, provider))
    controller.watches(provider.informer(Sandbox), partial(checkpoints_of_sandbox, provider))
