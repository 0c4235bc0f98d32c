"""Plan steps that several kinds share. Steps of one kind are in that kind's `plan.py`."""

from datetime import datetime

from msgspec import Struct


class Step(Struct, frozen=True, tag=True):
    """Base class of all plan steps."""


class Wait(Step, frozen=True):
    """Nothing to do until `until`; `None` waits for the next change of the object."""

    until: datetime | None
    reason: str = ""


class AddFinalizer(Step, frozen=True):
    """Add the finalizer first, so that nothing the runtime creates can be leaked."""


class Fail(Step, frozen=True):
    """The object cannot reach its desired state."""

    message: str
    reason: str = "Failed"
    """Reason of the condition Ready (False)."""


class Expire(Step, frozen=True):
    """The object's deadline or TTL has passed: delete it."""
