"""One member during one reconcile: current state, decision, and result."""

from msgspec import Struct

from paddock.controllers.env.autoscale import Decision, ScalingAction
from paddock.controllers.env.render import size_of
from paddock.resources.kinds.env import EnvMember, ScalingGroup
from paddock.resources.kinds.pool import AutoscalingState, SandboxPool
from paddock.resources.meta import Key

NO_STATE = AutoscalingState()


class MemberProblem(Struct, frozen=True):
    """Why a member is not in its desired state."""

    reason: str
    message: str


class MemberReconcile(Struct, kw_only=True):
    """One member in one reconcile."""

    name: str
    member: EnvMember
    key: Key
    """Key of its pool."""
    pool: SandboxPool | None = None
    """The existing pool."""
    group: ScalingGroup | None = None
    """Its scaling group; `None` if it does not scale."""
    decision: Decision | None = None
    state: AutoscalingState = NO_STATE
    wanted: int = 0
    """The size that the autoscaler decided."""
    granted: int = 0
    """The size that admission granted."""
    draft: SandboxPool | None = None
    """The pool rendered at its current size; `None` if the member has a problem."""
    rendered: SandboxPool | None = None
    """The desired pool; `None` if it is not to be changed."""
    problem: MemberProblem | None = None
    """A problem of the member itself."""
    refusal: MemberProblem | None = None
    """Why the desired size was not granted."""
    idle: int = 0
    running: int = 0
    pending: int = 0

    @property
    def size(self) -> int:
        """The current size."""
        return size_of(self.pool) if self.pool is not None else 0

    @property
    def is_scaled(self) -> bool:
        """Whether the autoscaler manages it."""
        return self.group is not None and self.group.enabled

    @property
    def action(self) -> ScalingAction:
        """The decided action."""
        return self.decision.action if self.decision is not None else ScalingAction.HOLD
