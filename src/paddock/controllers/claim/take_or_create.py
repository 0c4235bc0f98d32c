"""Acquires sandboxes for SandboxClaims, with the claim engine that API requests use.

The number of sandboxes and the moment are the controller's decision.
"""

from functools import partial

from paddock.claims import cold
from paddock.claims.acquirer import Acquirer, Attempt
from paddock.claims.caller import Caller
from paddock.claims.lost_replies import LostReplies
from paddock.claims.terms import sandbox_claim_terms
from paddock.resources.kinds.claim import SandboxClaim
from paddock.resources.kinds.pool import SandboxPool
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.tokens import TokenSeed
from paddock.resources.transitions.claim import ClaimRequirements, Terms

TURN_SECONDS = 2.0
"""Longest wait of a reconcile for a turn to create: other claims need its worker."""


class ClaimAcquirer:
    """Acquires sandboxes for SandboxClaims, one at a time."""

    def __init__(
        self, acquirer: Acquirer, seed: TokenSeed, *, paused_retention_seconds: int | None = None
    ) -> None:
        self._acquirer = acquirer
        self._seed = seed
        self._paused_retention_seconds = paused_retention_seconds
        self.lost_replies = LostReplies(
            acquirer.provider, acquirer.reservations, acquirer.pool_members
        )

    async def acquire(
        self,
        claim: SandboxClaim,
        requirements: ClaimRequirements,
        pool: SandboxPool | None,
        *,
        creates: bool,
    ) -> bool:
        """Acquire one sandbox; False, with nothing changed, if there is none now."""
        terms = sandbox_claim_terms(
            claim,
            requirements,
            self._seed,
            account=self._acquirer.reservations.account,
            retention_seconds=self._paused_retention_seconds,
            now=self._acquirer.clock.now(),
        )
        new_sandbox = partial(self._new_sandbox, claim, terms, requirements) if creates else None

        async def work(attempt: Attempt) -> tuple[Sandbox, str] | None:
            return await attempt.take_or_create(
                pool.key if pool is not None else None, new_sandbox, turn_seconds=TURN_SECONDS
            )

        acquired = await self._acquirer.acquire(
            Caller(terms.identity.owner, terms.identity.key_id),
            terms,
            requirements.size,
            work,
            on_unresolved=self.lost_replies.add,
        )
        return acquired is not None

    def _new_sandbox(
        self, claim: SandboxClaim, terms: Terms, requirements: ClaimRequirements
    ) -> Sandbox:
        return cold.new_sandbox(
            terms,
            requirements.template,
            namespace=claim.metadata.namespace,
            template_name=claim.spec.template_name,
            now=self._acquirer.clock.now(),
        )
