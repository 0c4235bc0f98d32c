"""Serves claims on an environment from this cluster, or from another one."""

from typing import Protocol

from paddock.claims.caller import Caller
from paddock.claims.ports import REMOTE, WARM, Take
from paddock.claims.requests import NewSandbox
from paddock.kit.errors import PaddockError
from paddock.manager.environments.member_choice import MemberCandidate
from paddock.manager.environments.queue import ClaimQueue
from paddock.manager.environments.ticket import Ticket, queue_preferences
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.meta import Key


class Forward(Protocol):
    """Forwards claims to other clusters."""

    async def claim(
        self, caller: Caller, request: NewSandbox, env: Key, where: MemberCandidate
    ) -> Sandbox:
        """Return a sandbox of another cluster; after an error there is none."""
        ...


class EnvironmentClaims:
    """Obtains sandboxes of environments."""

    def __init__(self, queue: ClaimQueue, *, forward: Forward | None = None) -> None:
        self._queue = queue
        self._forward = forward

    async def obtain(
        self, caller: Caller, request: NewSandbox, env: Key, take: Take
    ) -> tuple[Sandbox, str]:
        """Wait in the queue; return the sandbox and its source."""
        priority, group = queue_preferences(request.metadata)
        ticket = Ticket(self._queue, env, priority=priority, group=group)
        # A retry with the same idempotency key is looked up here, so it is served here.
        ticket.stays_here = bool(
            self._forward is None or request.is_forwarded or request.idempotency_key
        )
        try:
            while True:
                found = await ticket.pool(may_wait=request.create_on_no_stock)
                if isinstance(found, MemberCandidate):
                    sandbox = await self._from_other_cluster(caller, request, env, found)
                    if sandbox is not None:
                        return sandbox, REMOTE
                    ticket.skipped |= {found.cluster}
                    continue
                sandbox = await take(found)
                if sandbox is not None:
                    return sandbox, WARM
        finally:
            ticket.release_grant()

    async def _from_other_cluster(
        self, caller: Caller, request: NewSandbox, env: Key, where: MemberCandidate
    ) -> Sandbox | None:
        if self._forward is None:
            return None
        try:
            return await self._forward.claim(caller, request, env, where)
        except PaddockError:
            # That cluster has none, or does not answer: try the next best.
            return None
