"""One member on its way through a reconcile: what is there, what is wanted, what came of it."""

from msgspec import Struct

from paddock.controllers.env.autoscale import Action, Decision
from paddock.controllers.env.render import size_of
from paddock.resources.kinds.env import EnvMember, ScalingGroup
from paddock.resources.kinds.pool import AutoscalingState, SandboxPool
from paddock.resources.meta import Key

NO_STATE = AutoscalingState()


class Problem(Struct, frozen=True):
    """Why a member is not as it should be."""

    reason: str
    message: str


class Case(Struct, kw_only=True):
    """One member."""

    name: str
    member: EnvMember
    key: Key
    """Of its pool."""
    pool: SandboxPool | None = None
    """As it is."""
    group: ScalingGroup | None = None
    """How it scales; `None` where nobody scales it."""
    decision: Decision | None = None
    state: AutoscalingState = NO_STATE
    wanted: int = 0
    """The size that was decided."""
    granted: int = 0
    """The size that was admitted."""
    draft: SandboxPool | None = None
    """What its spec makes, at the size it has; `None` where something is wrong with it."""
    rendered: SandboxPool | None = None
    """As it should be; `None` where it is to be left alone."""
    problem: Problem | None = None
    """What is wrong with the member itself."""
    refusal: Problem | None = None
    """Why it may not be as large as was wanted."""
    idle: int = 0
    running: int = 0
    pending: int = 0

    @property
    def size(self) -> int:
        """Its size now."""
        return size_of(self.pool) if self.pool is not None else 0

    @property
    def is_scaled(self) -> bool:
        """Say whether the autoscaler looks after it."""
        return self.group is not None and self.group.enabled

    @property
    def action(self) -> Action:
        """What was decided."""
        return self.decision.action if self.decision is not None else Action.HOLD
