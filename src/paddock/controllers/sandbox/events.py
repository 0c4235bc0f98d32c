"""Which changes enqueue a sandbox. Events of the runtime are in `runtime_events.py`."""

from paddock.controllers.sandbox.health_probe import HealthProbes
from paddock.controllers.sandbox.runtime_events import RuntimeEvents
from paddock.controllers.sandbox.while_paused import WhilePaused
from paddock.engine.controller import Controller, own_key
from paddock.engine.informer import Informer
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.meta import Key


def subscribe(
    controller: Controller[Key],
    sandboxes: Informer[Sandbox],
    runtime_events: RuntimeEvents,
    probes: HealthProbes,
    while_paused: WhilePaused,
) -> None:
    """Enqueue changed sandboxes, and tell each part that follows them."""
    sandboxes.subscribe(runtime_events.observe)
    sandboxes.subscribe(probes.observe)
    sandboxes.subscribe(while_paused.observe)
    controller.watches(sandboxes, own_key)
