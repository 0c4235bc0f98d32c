"""What a claim needs of others: a place in line, quota, a turn at creating, a size or an image."""

from collections.abc import Callable
from datetime import datetime
from typing import Protocol

from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.kinds.template import Resources, SandboxTemplateSpec
from paddock.resources.meta import Key
from paddock.resources.transitions.claim import Fit


class Line(Protocol):
    """Where claims on environments wait for their turn."""

    def enqueue(
        self,
        claim: Key,
        env: Key,
        *,
        count: int,
        priority: int,
        since: datetime,
        wake: Callable[[Key], None],
    ) -> None:
        """Let a claim wait for so many more."""
        ...

    def take_granted(self, claim: Key, env: Key) -> Key | None:
        """Give a pool that has one for this claim."""
        ...

    def settle(self, env: Key, pool: Key) -> None:
        """Take in that what a pool had was taken, or was not there after all."""
        ...

    def forget(self, claim: Key) -> None:
        """Take a claim out of line."""
        ...


class Gate(Protocol):
    """Who may have one more: the same rules as for clients of the API."""

    @property
    def account(self) -> str:
        """What is written on what is claimed, where several processes share quotas."""
        ...

    async def reserve(self, team: str, lock: str, resources: Resources) -> None:
        """Count one more for a team before it is written; `QuotaExceededError` counts nothing."""
        ...

    def must_hold(self, team: str) -> None:
        """Raise `UnavailableError` where what was counted may not be written any more."""
        ...

    def release(self, lock: str) -> None:
        """Forget one whose write is known not to have happened."""
        ...

    async def turn(self, team: str) -> None:
        """Wait for this team's turn at creating one, where stock is out."""
        ...


class Fitting(Protocol):
    """Another image or size for what is claimed: the same rules as for clients of the API."""

    def fit(
        self, template: SandboxTemplateSpec, *, image: str = "", resources: Resources | None = None
    ) -> Fit:
        """Say how it is to be; `ForbiddenError` and `InvalidError` where it may not be so."""
        ...

    async def resize(self, sandbox: Sandbox, template: SandboxTemplateSpec) -> None:
        """Give a sandbox from stock the size that its claim wrote, and record that it has it.

        `UnsupportedError` where its machine refuses.
        """
        ...
