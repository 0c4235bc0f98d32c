"""The operations of the simulated driver: their latencies, and scripted failures."""

from collections.abc import Mapping
from enum import StrEnum

from msgspec import Struct


class Operation(StrEnum):
    """Operations with a latency that may fail."""

    CREATE = "create"
    START = "start"
    CONFIGURE = "configure"
    UPDATE_IMAGE = "update_image"
    FREEZE = "freeze"
    THAW = "thaw"
    HIBERNATE = "hibernate"
    RESTORE = "restore"
    STOP = "stop"
    SNAPSHOT = "snapshot"
    FORK = "fork"
    DESTROY = "destroy"
    SET_EGRESS = "set_egress"
    INSPECT = "inspect"
    USAGE = "usage"


LATENCIES: Mapping[Operation, float] = {
    Operation.CREATE: 0.008,
    Operation.START: 0.0,
    Operation.CONFIGURE: 0.001,
    Operation.UPDATE_IMAGE: 0.01,
    Operation.FREEZE: 0.001,
    Operation.THAW: 0.001,
    Operation.HIBERNATE: 0.12,
    Operation.RESTORE: 0.06,
    Operation.STOP: 0.01,
    Operation.SNAPSHOT: 0.1,
    Operation.FORK: 0.15,
    Operation.DESTROY: 0.003,
    Operation.SET_EGRESS: 0.001,
    Operation.INSPECT: 0.0,
    Operation.USAGE: 0.0,
}
"""Default latencies in seconds, similar to those of the local driver on a small machine."""


class ScriptedFailure(Struct, frozen=True, kw_only=True):
    """A failure of the next matching operation."""

    operation: Operation
    error: Exception
    uid: str | None = None
    after_effect: bool = False
    """Fail after the work is done: the reply is lost."""
