"""The state of the simulated driver: sandboxes, latencies of operations, scripted failures."""

from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum

from msgspec import Struct

from paddock.runtime.port import (
    AgentConfig,
    Blueprint,
    EgressPolicy,
    Instance,
    StoredCheckpoint,
)


class Operation(StrEnum):
    """Operations with a latency that may fail."""

    ENSURE_IMAGE = "ensure_image"
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
    Operation.ENSURE_IMAGE: 0.0,
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


class SimulatedSandbox:
    """One simulated sandbox."""

    __slots__ = ("agent", "base", "blueprint", "egress", "files", "instance", "is_started")

    def __init__(self, blueprint: Blueprint, instance: Instance) -> None:
        self.blueprint = blueprint
        self.instance = instance
        self.agent: AgentConfig = blueprint.agent
        self.egress: EgressPolicy = blueprint.egress
        self.files: dict[str, str] | None = None
        self.is_started = False
        self.base = ("", 0)
        """The checkpoint that it shares files with, and how many bytes."""

    @property
    def file_bytes(self) -> int:
        """The size of all files."""
        return sum(map(len, (self.files or {}).values()))

    def share_with(self, checkpoint_id: str | None) -> None:
        """Record a checkpoint that has the same files."""
        self.base = (checkpoint_id, self.file_bytes) if checkpoint_id else ("", 0)

    def stored(self, checkpoint_id: str, *, memory_bytes: int, now: datetime) -> StoredCheckpoint:
        """Return a new checkpoint of the sandbox."""
        base, shared = self.base
        self.share_with(checkpoint_id)
        return StoredCheckpoint(
            id=checkpoint_id,
            source_uid=self.blueprint.uid,
            has_memory=memory_bytes > 0,
            size_bytes=self.file_bytes + memory_bytes,
            created_at=now,
            image=self.blueprint.image,
            base_id=base,
            shared_bytes=min(shared, self.file_bytes),
        )
