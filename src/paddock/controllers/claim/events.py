"""Which changes enqueue a SandboxClaim: its own, its sandboxes', and its turn in the queue."""

from paddock.cache.provider import Provider
from paddock.controllers.claim.controller import ClaimController
from paddock.engine.controller import Controller, own_key
from paddock.resources.kinds.claim import SandboxClaim
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.meta import Key

GATHER_SECONDS = 0.05
"""Changes of a claim's sandboxes within this time lead to one reconcile."""


def subscribe(controller: Controller[Key], provider: Provider, claims: ClaimController) -> None:
    """Enqueue claims."""

    def sandbox_changed(old: Sandbox | None, new: Sandbox | None) -> None:
        for key in claims.claim_of_change(old, new):
            controller.queue.add_after(key, GATHER_SECONDS)

    controller.watches(provider.informer(SandboxClaim), own_key)
    claims.wake = controller.queue.add
    provider.informer(Sandbox).subscribe(sandbox_changed)
