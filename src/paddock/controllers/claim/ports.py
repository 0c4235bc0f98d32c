"""Ports of the claim controller: the queue of claims on environments, which is the manager's."""

from collections.abc import Callable
from datetime import datetime
from typing import Protocol

from paddock.resources.meta import Key


class EnvironmentQueue(Protocol):
    """Where claims on environments wait for a member with an idle sandbox."""

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
        """Queue a claim for `count` sandboxes in all; `wake` is called on each grant."""
        ...

    def take_granted(self, claim: Key, env: Key) -> Key | None:
        """Return a pool that was granted to this claim, once; then call `release_grant`."""
        ...

    def release_grant(self, env: Key, pool: Key) -> None:
        """End a grant: its sandbox was taken, or was not there."""
        ...

    def forget(self, claim: Key) -> None:
        """Remove a claim from all queues and return its grants."""
        ...
