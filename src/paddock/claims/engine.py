"""Claims of API clients: from a request to a running sandbox that the caller owns.

The sequence that acquires a sandbox exactly once is in `acquirer`, shared with SandboxClaims. This
module adds what only requests have: idempotency keys, environments, and the handover.
"""

import asyncio
import math
from functools import partial

from msgspec import UnsetType, structs

from paddock.cache import indexes
from paddock.cache.provider import Provider
from paddock.claims import cold
from paddock.claims.acquirer import Acquirer, Attempt
from paddock.claims.caller import Caller
from paddock.claims.cleanup import ClaimCleanup
from paddock.claims.hand_over import HandOver
from paddock.claims.idempotency import MARGIN_SECONDS, IdempotencyKeys, request_hash
from paddock.claims.network.ceilings import CeilingOf, no_ceiling
from paddock.claims.network.requested import RequestedNetwork, requested
from paddock.claims.overrides import ClaimOverrides
from paddock.claims.ports import COLD, REMOTE, EnvironmentSource
from paddock.claims.requests import NewSandbox
from paddock.claims.template_resolver import ClaimTarget, TemplateResolver
from paddock.claims.terms import request_terms
from paddock.claims.validation import MAX_TIMEOUT_SECONDS, check_request
from paddock.kit import metrics
from paddock.kit.clock import Clock
from paddock.kit.errors import (
    ConflictError,
    DeadlineExceededError,
    FieldProblem,
    InvalidError,
    RateLimitedError,
    UnavailableError,
    UnsupportedError,
)
from paddock.resources.kinds.pool import CONDITION_DEGRADED, SandboxPool
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.meta import ConditionStatus, Key, condition
from paddock.resources.tokens import TokenSeed
from paddock.resources.transitions.claim import Terms

_CLAIMS = metrics.counter("paddock_claims_total", "Claims by where they came from.", ("source",))
_SECONDS = metrics.histogram("paddock_claim_seconds", "Time from request to sandbox.", ("source",))


class Claims:
    """Claims sandboxes for API clients."""

    def __init__(
        self,
        *,
        provider: Provider,
        acquirer: Acquirer,
        resolver: TemplateResolver,
        cleanup: ClaimCleanup,
        hand_over: HandOver,
        overrides: ClaimOverrides,
        seed: TokenSeed,
        clock: Clock,
        environments: EnvironmentSource | None = None,
        idempotency_keys: IdempotencyKeys | None = None,
        max_timeout_seconds: int = MAX_TIMEOUT_SECONDS,
        paused_retention_seconds: int | None = None,
        ceiling_of: CeilingOf = no_ceiling,
    ) -> None:
        self._provider = provider
        self._acquirer = acquirer
        self._resolver = resolver
        self._cleanup = cleanup
        self._hand_over = hand_over
        self._overrides = overrides
        self._seed = seed
        self._clock = clock
        self._environments = environments
        self._idempotency_keys = idempotency_keys
        """Needed where other processes may receive the same idempotency key."""
        self._max_timeout = max_timeout_seconds
        self._paused_retention_seconds = paused_retention_seconds
        self._ceiling_of = ceiling_of
        self._in_flight: dict[tuple[str, str], tuple[str, asyncio.Task[Sandbox]]] = {}
        """Claims in flight by team and idempotency key, each with the hash of its request."""

    async def create(self, caller: Caller, request: NewSandbox) -> Sandbox:
        """Return a sandbox that the caller owns and that accepts requests."""
        caller.require("create", "sandboxclaims", template=request.template)
        self.check(request)
        target = self._resolver.resolve(caller, request.template)
        if request.image:
            self._overrides.check_image(request.image)
            if target.checkpoint is not None or target.env is not None:
                problem = FieldProblem("image", "cannot be chosen for a snapshot or an environment")
                raise InvalidError(str(problem), problems=[problem])
        # Before it is made or joined: a refusal leaves nothing behind.
        self._network(caller, request, target)
        if not request.idempotency_key:
            return await self._claim(caller, request, target)
        made = await self._create_once(caller, request, target)
        if caller.scopes and (claim := made.spec.claim) and not caller.may_use(claim):
            raise ConflictError("the same idempotency key was used by another API key")
        return made

    def check(self, request: NewSandbox) -> None:
        """Raise `InvalidError` for a request that cannot be served whatever the store holds."""
        check_request(request, max_timeout_seconds=self._max_timeout)
        self._hand_over.check(request)

    # ---- idempotency keys ----------------------------------------------------------------

    async def _create_once(
        self, caller: Caller, request: NewSandbox, target: ClaimTarget
    ) -> Sandbox:
        """Join a claim in flight with the same key, or return the sandbox that it made."""
        key = (caller.team, request.idempotency_key)
        digest = request_hash(request)
        first, task = self._in_flight.get(key, (digest, None))
        known = self._provider.informer(Sandbox).by_index(indexes.IDEMPOTENCY_KEY, key)
        if task is None and known and (claim := known[0].spec.claim) is not None:
            first = claim.idempotency_hash or digest
        if first != digest:
            raise ConflictError("the same idempotency key was used for another request")
        if task is None:
            again = self._hand_over.prepare_again(known[0]) if known else None
            work = again or self._claim_first(caller, request, target, digest)
            task = asyncio.get_running_loop().create_task(work, name=f"claim {key}")
            self._in_flight[key] = (digest, task)
            task.add_done_callback(lambda _: self._in_flight.pop(key, None))
        # The claim continues if this client disconnects: a retry with the same key joins it.
        return await asyncio.shield(task)

    async def _claim_first(
        self, caller: Caller, request: NewSandbox, target: ClaimTarget, digest: str
    ) -> Sandbox:
        """Claim, unless another process does or did with this key; then wait for its sandbox."""
        if self._idempotency_keys is None:
            return await self._claim(caller, request, target)
        found = await self._idempotency_keys.acquire(
            caller.team, request.idempotency_key, digest, seconds=request.claim_timeout_seconds
        )
        if isinstance(found, Sandbox):
            claim = found.spec.claim
            if claim is not None and claim.idempotency_hash not in ("", digest):
                raise ConflictError("the same idempotency key was used for another request")
            return await self._hand_over.prepare_again(found)
        try:
            return await self._claim(caller, request, target, until=found.until + MARGIN_SECONDS)
        except (asyncio.CancelledError, Exception):
            # The key is free again as soon as nothing of this claim can be left.
            self._cleanup.after(partial(self._idempotency_keys.release, found))
            raise

    # ---- one claim -----------------------------------------------------------------------

    async def _claim(
        self,
        caller: Caller,
        request: NewSandbox,
        target: ClaimTarget,
        *,
        resizes: bool = True,
        until: float = math.inf,
    ) -> Sandbox:
        started = self._clock.monotonic()
        reservations = self._acquirer.reservations
        requirements = self._overrides.requirements(
            target.template, image=request.image, resources=request.resources
        )
        network = self._network(caller, request, target)
        requirements = structs.replace(
            requirements, network=network.policy, network_opened=network.is_opened
        )
        terms = request_terms(
            caller,
            request,
            requirements,
            self._seed,
            account=reservations.account,
            idempotency_hash=request_hash(request) if request.idempotency_key else "",
            retention_seconds=self._paused_retention_seconds,
            now=self._clock.now(),
        )
        can_be_warm = not requirements.obstacle and (resizes or requirements.resources is None)
        pool = target.pool if can_be_warm else None
        target = structs.replace(target, template=requirements.template)
        sandbox, source = await self._acquirer.acquire(
            caller,
            terms,
            requirements.size,
            lambda attempt: self._obtain(caller, request, target, terms, pool, attempt),
            # Whether the store has something of this claim is not known: it keeps its quota.
            on_unresolved=self._cleanup.begin_all,
        )
        if source == REMOTE:
            # The other cluster has handed it over, and counts it.
            reservations.release(terms.identity.lock)
            _CLAIMS.labels(source).inc()
            return sandbox
        try:
            self._check_in_time(caller.team, until)
            ready = await self._hand_over.prepare(sandbox, request, target.template, source)
        except UnsupportedError as error:
            await self._hand_over.abort(sandbox, request, error)
            if source == COLD or not resizes or requirements.resources is None:
                raise
            # Its node refused the size of this claim: create a sandbox of that size instead.
            return await self._claim(caller, request, target, resizes=False, until=until)
        except (asyncio.CancelledError, Exception) as error:
            await self._hand_over.abort(sandbox, request, error)
            raise
        _CLAIMS.labels(source).inc()
        _SECONDS.labels(source).observe(self._clock.monotonic() - started)
        return ready

    def _network(
        self, caller: Caller, request: NewSandbox, target: ClaimTarget
    ) -> RequestedNetwork:
        """Return the network policy; `ForbiddenError` if the request names more than allowed."""
        opens = () if isinstance(request.opens, UnsetType) else request.opens
        return requested(
            caller,
            request.network,
            opens,
            template=target.template.network,
            base=target.network,
            ceiling=self._ceiling_of(caller.team),
        )

    async def _obtain(
        self,
        caller: Caller,
        request: NewSandbox,
        target: ClaimTarget,
        terms: Terms,
        pool: Key | None,
        attempt: Attempt,
    ) -> tuple[Sandbox, str]:
        """Make a sandbox the caller's, within the claim timeout; return it and its source."""
        try:
            async with asyncio.timeout(request.claim_timeout_seconds):
                if target.env is not None and self._environments is not None:
                    return await self._environments.obtain(
                        caller, request, target.env, attempt.take_warm
                    )
                new_sandbox = None
                if request.create_on_no_stock:
                    new_sandbox = partial(self._new_sandbox, caller, request, target, terms)
                found = await attempt.take_or_create(pool, new_sandbox)
                if found is None:
                    raise RateLimitedError(
                        f"no idle sandbox of template {request.template!r}", retry_after_seconds=1
                    )
                return found
        except TimeoutError as error:
            problem = self._start_problem(pool)
            raise DeadlineExceededError(
                f"no sandbox was available within {request.claim_timeout_seconds:g} s{problem}",
                hint="raise the pool's buffer, or request a longer claim timeout",
            ) from error

    def _start_problem(self, pool: Key | None) -> str:
        """Return why the sandboxes of a pool do not start, if they do not."""
        found = self._provider.informer(SandboxPool).get(pool) if pool is not None else None
        degraded = condition(found.status.conditions, CONDITION_DEGRADED) if found else None
        if degraded is None or degraded.status is not ConditionStatus.TRUE:
            return ""
        return f"; sandboxes of its pool do not start: {degraded.message}"

    def _new_sandbox(
        self, caller: Caller, request: NewSandbox, target: ClaimTarget, terms: Terms
    ) -> Sandbox:
        checkpoint = target.checkpoint
        home = target.pool or target.template_key
        namespace = checkpoint.metadata.namespace if checkpoint else None
        return cold.new_sandbox(
            terms,
            target.template,
            namespace=namespace or (home.namespace if home else caller.team),
            template_name=target.template_name,
            now=self._clock.now(),
            name=request.name,
            name_prefix=request.name_prefix,
            restore_from=checkpoint.status.checkpoint_id if checkpoint else None,
        )

    def _check_in_time(self, team: str, until: float) -> None:
        """Raise where the write came so late that other processes may have counted without it."""
        self._acquirer.reservations.require_valid_share(team)
        if self._clock.monotonic() > until:
            raise UnavailableError("the claim took too long", retry_after_seconds=1)
