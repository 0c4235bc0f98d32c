"""Making one more sandbox a claim's: out of stock, or newly made.

Quota is reserved first; then the same compare-and-swap that API claims use, or one create. A
reply that is lost is looked up by the claim's lock, never blindly repeated. How many, when, and
what becomes of them is the controller's business.
"""

import asyncio

from paddock.cache.pool_members import PoolMembers
from paddock.cache.provider import Provider
from paddock.claims import warm
from paddock.controllers.claim.ports import Gate
from paddock.kit import ids
from paddock.kit.clock import Clock
from paddock.kit.errors import PaddockError
from paddock.resources.kinds.claim import SandboxClaim
from paddock.resources.kinds.pool import SandboxPool
from paddock.resources.kinds.sandbox import (
    FINALIZER_SANDBOX,
    LABEL_CLAIM,
    LABEL_TEMPLATE,
    ClaimIdentity,
    Sandbox,
    SandboxSpec,
)
from paddock.resources.kinds.template import SandboxTemplateSpec
from paddock.resources.meta import Key, ObjectMeta
from paddock.resources.tokens import TokenSeed, hashed
from paddock.resources.transitions.claim import Fit, Terms, claimed

TURN_SECONDS = 2.0
"""How long a reconcile waits for a turn at creating; other claims want its worker."""


class Taker:
    """Takes sandboxes for claims, one at a time."""

    def __init__(
        self,
        *,
        provider: Provider,
        pool_members: PoolMembers,
        seed: TokenSeed,
        clock: Clock,
        gate: Gate,
    ) -> None:
        self._provider = provider
        self._pool_members = pool_members
        self._seed = seed
        self._clock = clock
        self._gate = gate
        self._unclear: list[Sandbox] = []
        """What may have been written though no reply came; each keeps its place in the quota."""

    async def take(
        self, claim: SandboxClaim, fit: Fit, pool: SandboxPool | None, *, creates: bool
    ) -> bool:
        """Get one more, if its team may have it and there is one; else nothing has changed."""
        terms = self._terms(claim, fit)
        lock = terms.identity.lock
        await self._gate.reserve(terms.identity.owner, lock, fit.size)
        unclear: list[Sandbox] = []
        try:
            taken = pool is not None and await self._from_stock(terms, pool.key, unclear)
            if not taken and creates:
                taken = await self._create(claim, terms, fit.template, unclear)
        except (asyncio.CancelledError, Exception):
            self._unclear += unclear
            if not unclear:
                self._gate.release(lock)
            raise
        if not taken:
            self._gate.release(lock)
        return taken

    async def clear_up(self) -> None:
        """Look what became of writes without a reply: what did not happen is counted no more."""
        while self._unclear:
            wanted = self._unclear[-1]
            found = await warm.written(self._provider, wanted)
            if self._unclear and self._unclear[-1] is wanted:
                self._unclear.pop()
                if found is None and wanted.spec.claim is not None:
                    self._gate.release(wanted.spec.claim.lock)

    async def _from_stock(self, terms: Terms, pool: Key, unclear: list[Sandbox]) -> bool:
        self._gate.must_hold(terms.identity.owner)
        now = self._clock.now()
        taken = await warm.take(
            self._pool_members,
            self._provider,
            pool,
            lambda sandbox: claimed(sandbox, terms, now=now),
            unclear=unclear,
        )
        return taken is not None

    async def _create(
        self,
        claim: SandboxClaim,
        terms: Terms,
        template: SandboxTemplateSpec,
        unclear: list[Sandbox],
    ) -> bool:
        try:
            async with asyncio.timeout(TURN_SECONDS):
                await self._gate.turn(terms.identity.owner)
        except TimeoutError:
            return False
        self._gate.must_hold(terms.identity.owner)
        wanted = self._fresh(claim, terms, template)
        unclear.append(wanted)
        try:
            await self._provider.write.create(wanted)
        except warm.AMBIGUOUS:
            found = await warm.written(self._provider, wanted)
            unclear.clear()
            return found is not None
        except PaddockError:
            unclear.clear()
            raise
        unclear.clear()
        return True

    def _fresh(self, claim: SandboxClaim, terms: Terms, template: SandboxTemplateSpec) -> Sandbox:
        wanted = Sandbox(
            metadata=ObjectMeta(
                name=f"sbx-{terms.identity.sandbox_id}",
                namespace=claim.metadata.namespace,
                finalizers=(FINALIZER_SANDBOX,),
                labels={LABEL_TEMPLATE: claim.spec.template_name},
            ),
            spec=SandboxSpec(template=template),
        )
        return claimed(wanted, terms, now=self._clock.now())

    def _terms(self, claim: SandboxClaim, fit: Fit) -> Terms:
        sandbox_id = ids.sandbox_id()
        identity = ClaimIdentity(
            sandbox_id=sandbox_id,
            owner=claim.metadata.namespace,
            lock=ids.uid(),
            claim_time=self._clock.now(),
            claim_uid=claim.metadata.uid,
            template_id=claim.spec.template_name,
            account=self._gate.account,
            access_token_hash=hashed(self._seed.access_token(sandbox_id)),
            env_vars=claim.spec.env_vars,
            timeout_seconds=self._timeout(claim),
        )
        return Terms(
            identity=identity,
            resources=fit.resources,
            image=fit.image,
            shutdown_time=claim.spec.shutdown_time,
            labels={**claim.spec.labels, LABEL_CLAIM: claim.metadata.name},
            annotations=claim.spec.annotations,
        )

    def _timeout(self, claim: SandboxClaim) -> int | None:
        """Give the fixed end as a timeout too, so that pausing and extending know of it."""
        end = claim.spec.shutdown_time
        if end is None:
            return None
        return max(int((end - self._clock.now()).total_seconds()), 1)
