"""Checkpoint: a stored state of a sandbox. New sandboxes can start from it."""

from datetime import datetime
from enum import StrEnum
from typing import ClassVar

from paddock.resources.kinds.template import NetworkPolicy, SandboxTemplateSpec
from paddock.resources.meta import Condition, Resource, ResourcePart

FINALIZER_CHECKPOINT = "paddock.dev/checkpoint"
REASON_UNSUPPORTED = "Unsupported"
"""Reason of the condition Ready (False): this runtime cannot store such a state."""
REASON_QUOTA = "QuotaExceeded"
"""Reason of the condition Ready (False): the quota `stored.bytes` has no room for it."""
REASON_NO_SPACE = "InsufficientStorage"
"""Reason of the condition Ready (False): the disk has no room for it beyond its reserve."""
REASON_UNSTORABLE = "Unstorable"
"""Reason of the condition Ready (False): this sandbox has something that cannot be stored."""


class Content(StrEnum):
    """Content of a checkpoint."""

    MEMORY = "memory"
    FILESYSTEM = "filesystem"


class CheckpointPhase(StrEnum):
    """Phase of a checkpoint."""

    PENDING = "Pending"
    CREATING = "Creating"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    TERMINATING = "Terminating"


class CheckpointSpec(ResourcePart, frozen=True, kw_only=True):
    """Desired content and lifetime of a checkpoint."""

    sandbox_name: str
    """Name of the sandbox to store. Immutable."""
    sandbox_uid: str = ""
    """UID of the sandbox. Protects against another sandbox with the same name. Set by the API when
    it creates the checkpoint. Immutable once set."""
    sandbox_id: str = ""
    """Public id of the sandbox. Its snapshots can be listed by this id after the sandbox is
    deleted."""
    keep_running: bool = True
    """Whether the sandbox keeps running. If false, it is paused. Defaults to true. Immutable."""
    persistent_contents: tuple[Content, ...] = (Content.MEMORY, Content.FILESYSTEM)
    """What to store: memory, the filesystem, or both. Defaults to both."""
    ttl_seconds_after_finished: int | None = None
    """Number of seconds after completion at which the checkpoint is deleted. If unset, it is kept.
    """
    owner: str = ""
    """Team that owns the checkpoint."""
    key_id: str = ""
    """Id of the API key that created the checkpoint. Its bytes count for the quota of the key, too.
    """
    checkpoint_id: str = ""
    """Public id of the checkpoint (`snapshotID`). If empty, it is derived from the UID. Immutable
    once set."""
    names: tuple[str, ...] = ()
    """Names by which clients can refer to the checkpoint, such as `team/name:tag`."""


class CheckpointStatus(ResourcePart, frozen=True, kw_only=True):
    """Observed state of a checkpoint."""

    observed_generation: int = 0
    """The generation that this status reflects."""
    phase: CheckpointPhase = CheckpointPhase.PENDING
    """Phase of the checkpoint."""
    message: str = ""
    """Human-readable details about the phase."""
    checkpoint_id: str = ""
    """Public id of the checkpoint."""
    has_memory: bool = False
    """Whether memory is stored, so that processes continue where they were."""
    size_bytes: int = 0
    """Size in bytes: the files that the sandbox had written, and its stored memory. It counts for
    the quota `stored.bytes`, of which `sharedBytes` count once for all with the same `baseUid`."""
    base_uid: str = ""
    """UID of the checkpoint that this one shares files with: that which its sandbox started from,
    or that which was taken of the sandbox before."""
    shared_bytes: int = 0
    """Bytes of files that are shared with the checkpoint `baseUid`, and take no further space."""
    completion_time: datetime | None = None
    """Time at which the checkpoint was completed."""
    template: SandboxTemplateSpec | None = None
    """Template of the source sandbox. Sandboxes started from the checkpoint use it."""
    network: NetworkPolicy | None = None
    """Network policy of the source sandbox. Sandboxes started from the checkpoint use it."""
    node_name: str = ""
    """Name of the node that stores the checkpoint."""
    conditions: tuple[Condition, ...] = ()
    """Conditions of the checkpoint, such as Ready."""


class Checkpoint(Resource, frozen=True, kw_only=True):
    """A stored state of a sandbox. New sandboxes can start from it."""

    KIND: ClassVar[str] = "Checkpoint"
    PLURAL: ClassVar[str] = "checkpoints"

    spec: CheckpointSpec = CheckpointSpec(sandbox_name="")
    status: CheckpointStatus = CheckpointStatus()
