"""The strategy of one pause. Pure."""

from paddock.resources.kinds.sandbox import SandboxSpec
from paddock.resources.kinds.template import PauseStrategy


def strategy_of(spec: SandboxSpec) -> PauseStrategy:
    """Return the strategy of a pause: the sandbox's, else the template's, else FREEZE."""
    if spec.pause_strategy is not None:
        return spec.pause_strategy
    return spec.template.pause_strategy if spec.template is not None else PauseStrategy.FREEZE


def strategy_for(spec: SandboxSpec, *, memory: bool) -> PauseStrategy | None:
    """Return `spec.pauseStrategy` for a pause with or without memory.

    A pause without memory applies once. The next pause with memory uses the strategy of the sandbox
    or of its template (`None`) again.
    """
    if not memory:
        return PauseStrategy.STOP
    return None if spec.pause_strategy is PauseStrategy.STOP else spec.pause_strategy
