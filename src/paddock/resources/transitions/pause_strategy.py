"""The strategy of one pause. Pure."""

from paddock.resources.kinds.sandbox import SandboxSpec
from paddock.resources.kinds.template import PauseStrategy


def strategy_for(spec: SandboxSpec, *, memory: bool) -> PauseStrategy | None:
    """Return `spec.pauseStrategy` for a pause with or without memory.

    A pause without memory is for this once: the next one with memory keeps it again, in the way
    that the sandbox or its template (`None`) asks for.
    """
    if not memory:
        return PauseStrategy.STOP
    return None if spec.pause_strategy is PauseStrategy.STOP else spec.pause_strategy
