"""The strategy of one pause. Pure."""

from paddock.resources.kinds.sandbox import SandboxSpec
from paddock.resources.kinds.template import PauseStrategy


def strategy_for(spec: SandboxSpec, *, memory: bool) -> PauseStrategy | None:
    """Return `spec.pauseStrategy` for a pause with or without memory.

    A pause without memory applies once. The next pause with memory uses the strategy of the sandbox
    or of its template (`None`) again.
    """
    if not memory:
        return PauseStrategy.STOP
    return None if spec.pause_strategy is PauseStrategy.STOP else spec.pause_strategy
