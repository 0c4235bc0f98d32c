"""The transitions between sandbox phases, in one table. All phase changes use `move`.

`docs/lifecycle.md` is generated from `TRANSITIONS`; `move` rejects transitions that are not in it.
"""

from enum import StrEnum

from paddock.resources.kinds.sandbox import Phase


class Trigger(StrEnum):
    """Causes of a transition."""

    STARTED = "the runtime has created it and envd responds"
    PAUSE_BEGAN = "spec.paused is set and saving its state takes a while"
    PAUSED = "its processes are stopped and its state is kept"
    PAUSE_FAILED = "it could not be paused and keeps running"
    RESUME_BEGAN = "spec.paused is cleared and restoring its state takes a while"
    RESUMED = "it runs again"
    RECYCLE_BEGAN = "it is released to its pool"
    RECYCLED = "it was reset"
    ENDED = "it exited normally"
    FAILED = "it could not be created, or it failed"
    DELETED = "its deletion was requested"


_LIVE = (
    Phase.PENDING,
    Phase.RUNNING,
    Phase.PAUSING,
    Phase.PAUSED,
    Phase.RESUMING,
    Phase.RECYCLING,
)

TRANSITIONS: dict[tuple[Phase, Trigger], Phase] = {
    (Phase.PENDING, Trigger.STARTED): Phase.RUNNING,
    (Phase.RUNNING, Trigger.PAUSE_BEGAN): Phase.PAUSING,
    (Phase.RUNNING, Trigger.PAUSED): Phase.PAUSED,
    (Phase.PAUSING, Trigger.PAUSED): Phase.PAUSED,
    (Phase.PAUSING, Trigger.PAUSE_FAILED): Phase.RUNNING,
    (Phase.RUNNING, Trigger.PAUSE_FAILED): Phase.RUNNING,
    (Phase.PAUSED, Trigger.RESUME_BEGAN): Phase.RESUMING,
    (Phase.PAUSED, Trigger.RESUMED): Phase.RUNNING,
    (Phase.RESUMING, Trigger.RESUMED): Phase.RUNNING,
    (Phase.RUNNING, Trigger.RECYCLE_BEGAN): Phase.RECYCLING,
    (Phase.RECYCLING, Trigger.RECYCLED): Phase.RUNNING,
    (Phase.RUNNING, Trigger.ENDED): Phase.SUCCEEDED,
    **{(phase, Trigger.FAILED): Phase.FAILED for phase in _LIVE},
    **{(phase, Trigger.DELETED): Phase.TERMINATING for phase in Phase},
}


def move(phase: Phase, trigger: Trigger) -> Phase:
    """Return the next phase. A transition that is not in the table is a bug."""
    following = TRANSITIONS.get((phase, trigger))
    if following is None:
        raise ValueError(f"no transition from {phase} when {trigger.value}")
    return following
