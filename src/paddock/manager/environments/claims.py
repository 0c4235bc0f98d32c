"""Claims addressed to an environment: from this cluster's stock, or from another cluster's."""

from typing import Protocol

from paddock.claims.caller import Caller
from paddock.claims.ports import REMOTE, WARM, Take
from paddock.claims.requests import NewSandbox
from paddock.kit.errors import PaddockError
from paddock.manager.environments.member_choice import MemberCandidate
from paddock.manager.environments.queue import ClaimQueue
from paddock.manager.environments.ticket import Ticket, wishes
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.meta import Key


class Forward(Protocol):
    """The way to other clusters."""

    async def claim(
        self, caller: Caller, request: NewSandbox, env: Key, where: MemberCandidate
    ) -> Sandbox:
        """Get a sandbox from another cluster; an error means that there is none from there."""
        ...


class EnvironmentClaims:
    """Obtains sandboxes of environments."""

    def __init__(self, queue: ClaimQueue, *, forward: Forward | None = None) -> None:
        self._queue = queue
        self._forward = forward

    async def obtain(
        self, caller: Caller, request: NewSandbox, env: Key, take: Take
    ) -> tuple[Sandbox, str]:
        """Wait for this claim's turn and give what it got, and from where."""
        priority, group = wishes(request.metadata)
        ticket = Ticket(self._queue, env, priority=priority, group=group)
        # What may be asked for twice is looked for here, so it must be here.
        ticket.stays_here = bool(
            self._forward is None or request.is_forwarded or request.idempotency_key
        )
        try:
            while True:
                found = await ticket.pool(may_wait=request.create_on_no_stock)
                if isinstance(found, MemberCandidate):
                    sandbox = await self._from_elsewhere(caller, request, env, found)
                    if sandbox is not None:
                        return sandbox, REMOTE
                    ticket.skipped |= {found.cluster}
                    continue
                sandbox = await take(found)
                if sandbox is not None:
                    return sandbox, WARM
        finally:
            ticket.settle()

    async def _from_elsewhere(
        self, caller: Caller, request: NewSandbox, env: Key, where: MemberCandidate
    ) -> Sandbox | None:
        if self._forward is None:
            return None
        try:
            return await self._forward.claim(caller, request, env, where)
        except PaddockError:
            # That cluster has none after all, or does not answer: the next best is asked.
            return None
