"""The request for a sandbox, independent of the protocol."""

from collections.abc import Mapping

from msgspec import UNSET, Struct, UnsetType

from paddock.resources.kinds.sandbox import IdlePause
from paddock.resources.kinds.template import NetworkPolicy, PauseStrategy, Resources

DEFAULT_TIMEOUT_SECONDS = 300


class NewSandbox(Struct, frozen=True, kw_only=True):
    """A request for one sandbox."""

    template: str
    """Name, alias or id of a pool, environment, template or snapshot."""
    timeout_seconds: int | None = DEFAULT_TIMEOUT_SECONDS
    """`None`: no timeout."""
    auto_pause: bool = False
    auto_pause_memory: bool = True
    auto_resume: bool = False
    metadata: Mapping[str, str] = {}
    env_vars: Mapping[str, str] = {}
    labels: Mapping[str, str] = {}
    network: NetworkPolicy | None = None
    """Added to the policy of the source; a `true` in it is a default, not a wish."""
    opens: tuple[str, ...] | UnsetType = UNSET
    """Fields of `network` that the client has set to `true` on purpose (`ceiling.exceeding`)."""
    resources: Resources | None = None
    image: str = ""
    """Replaces the image of the template, if the operator allows that."""
    secure: bool = True
    idempotency_key: str = ""
    claim_timeout_seconds: float = 60.0
    """Longest wait for a warm sandbox or for a turn to create one."""
    ready_timeout_seconds: float = 60.0
    paused_retention_seconds: int | UnsetType | None = UNSET
    """How long it is kept when paused; `None`: indefinitely; unset: as the settings say."""
    pause_strategy: PauseStrategy | None = None
    """Replaces the pause strategy of the template."""
    create_on_no_stock: bool = True
    reserve_failed: bool = False
    """Keep a sandbox that could not be handed over, for inspection."""
    reserve_failed_seconds: int | None = None
    """How long to keep it; `None`: until its own deadline."""
    idle_pause: IdlePause | None = None
    name: str = ""
    """Name of the object, if it is created."""
    name_prefix: str = ""
    """Prefix of a generated name, if no name is given."""
    is_forwarded: bool = False
    """Forwarded by another cluster: served from this cluster, or not at all."""
    sandbox_id: str = ""
    """The id of the sandbox, if another cluster has chosen it."""
