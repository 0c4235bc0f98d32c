"""Checkpoint: a stored state of a sandbox, from which others start."""

from datetime import datetime
from enum import StrEnum
from typing import ClassVar

from paddock.resources.kinds.template import SandboxTemplateSpec
from paddock.resources.meta import Condition, Resource, ResourcePart

FINALIZER_CHECKPOINT = "paddock.dev/checkpoint"
REASON_UNSUPPORTED = "Unsupported"
"""On the condition Ready (False): this runtime never stores such a state."""


class Content(StrEnum):
    """What a checkpoint holds."""

    MEMORY = "memory"
    FILESYSTEM = "filesystem"


class CheckpointPhase(StrEnum):
    """Where a checkpoint is in its life."""

    PENDING = "Pending"
    CREATING = "Creating"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    TERMINATING = "Terminating"


class CheckpointSpec(ResourcePart, frozen=True, kw_only=True):
    """What to store."""

    sandbox_name: str
    """Immutable."""
    sandbox_uid: str = ""
    """Fences against a namesake; filled in by who creates it through the API."""
    sandbox_id: str = ""
    """The sandbox's public id: its snapshots are found by it when it is long gone."""
    keep_running: bool = True
    """Off: the sandbox is paused by it."""
    persistent_contents: tuple[Content, ...] = (Content.MEMORY, Content.FILESYSTEM)
    """What is stored."""
    ttl_seconds_after_finished: int | None = None
    """When it is deleted again; absent means never."""
    owner: str = ""
    """The team."""
    checkpoint_id: str = ""
    """The public id (`snapshotID`); made from the uid where empty."""
    names: tuple[str, ...] = ()
    """Names by which clients may ask for it, such as `team/name:tag`."""


class CheckpointStatus(ResourcePart, frozen=True, kw_only=True):
    """What is."""

    observed_generation: int = 0
    """The generation that this status is about."""
    phase: CheckpointPhase = CheckpointPhase.PENDING
    """Where it is in its life."""
    message: str = ""
    """One sentence for people."""
    checkpoint_id: str = ""
    """The public id."""
    has_memory: bool = False
    """Whether processes go on where they were."""
    size_bytes: int = 0
    """What it takes on disk."""
    completion_time: datetime | None = None
    """When it was done."""
    template: SandboxTemplateSpec | None = None
    """What the source was made of, so that children are made alike."""
    node_name: str = ""
    """The machine it is on."""
    conditions: tuple[Condition, ...] = ()
    """Ready and so on."""


class Checkpoint(Resource, frozen=True, kw_only=True):
    """A stored state of a sandbox."""

    KIND: ClassVar[str] = "Checkpoint"
    PLURAL: ClassVar[str] = "checkpoints"

    spec: CheckpointSpec = CheckpointSpec(sandbox_name="")
    status: CheckpointStatus = CheckpointStatus()
