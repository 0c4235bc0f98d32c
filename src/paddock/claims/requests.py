"""A sandbox as a client asks for it, free of any protocol."""

from collections.abc import Mapping

from msgspec import Struct

from paddock.resources.kinds.sandbox import IdlePause
from paddock.resources.kinds.template import NetworkPolicy, PauseStrategy, Resources

DEFAULT_TIMEOUT_SECONDS = 300


class NewSandbox(Struct, frozen=True, kw_only=True):
    """A sandbox as a client asks for it."""

    template: str
    """A pool, an environment, a template, a snapshot: its name, alias or id."""
    timeout_seconds: int | None = DEFAULT_TIMEOUT_SECONDS
    """`None` is never."""
    auto_pause: bool = False
    auto_pause_memory: bool = True
    auto_resume: bool = False
    metadata: Mapping[str, str] = {}
    env_vars: Mapping[str, str] = {}
    labels: Mapping[str, str] = {}
    network: NetworkPolicy | None = None
    resources: Resources | None = None
    image: str = ""
    """Another image than the template's, where the operator lets clients choose."""
    secure: bool = True
    idempotency_key: str = ""
    claim_timeout_seconds: float = 60.0
    """How long to wait for stock or for a turn to create."""
    ready_timeout_seconds: float = 60.0
    paused_retention_seconds: int | None = None
    pause_strategy: PauseStrategy | None = None
    """How it is paused, where not as its template says."""
    create_on_no_stock: bool = True
    reserve_failed: bool = False
    """Keep what could not be handed over, for somebody to look at."""
    reserve_failed_seconds: int | None = None
    """For so long; `None`: until its own end."""
    idle_pause: IdlePause | None = None
    name: str = ""
    """A name for the object, where it is newly made."""
    name_prefix: str = ""
    """What such a name begins with, where none is given."""
    is_forwarded: bool = False
    """Sent here by another cluster: served from here, or not at all."""
    sandbox_id: str = ""
    """The id that it must have, where another cluster has chosen one."""
