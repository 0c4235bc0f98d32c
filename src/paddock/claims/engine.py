"""Claiming: from a client's wish to a sandbox that is theirs and answers.

Exactly once: quota is reserved first, then one compare-and-swap makes a warm sandbox the
caller's, or one create makes a new one. A reply that is lost is looked up by the claim's lock,
never blindly repeated. What fails after the lock is cleaned up under a deadline of its own.
"""

import asyncio
import hashlib
import logging
import math
from datetime import datetime, timedelta
from functools import partial

import msgspec
from msgspec import structs

from paddock.cache import indexes
from paddock.cache.pool_members import PoolMembers
from paddock.cache.provider import Provider
from paddock.claims import warm
from paddock.claims.caller import Caller
from paddock.claims.cleanup import ClaimCleanup
from paddock.claims.idempotency import MARGIN_SECONDS, IdempotencyKeys
from paddock.claims.limiter import FairLimiter
from paddock.claims.overrides import ClaimOverrides
from paddock.claims.ports import REMOTE, Announcer, ClaimAgent, EnvironmentSource
from paddock.claims.quota.ledger import footprint
from paddock.claims.quota.reservations import QuotaReservations
from paddock.claims.requests import NewSandbox
from paddock.claims.template_resolver import ClaimTarget, TemplateResolver
from paddock.kit import ids, metrics, tasks
from paddock.kit.clock import Clock
from paddock.kit.errors import (
    ConflictError,
    DeadlineExceededError,
    FieldProblem,
    InvalidError,
    NotFoundError,
    PaddockError,
    RateLimitedError,
    UnavailableError,
    UnsupportedError,
)
from paddock.kit.logs import fields
from paddock.resources.kinds.sandbox import (
    FINALIZER_SANDBOX,
    LABEL_GIVEN_UP,
    LABEL_TEMPLATE,
    ClaimIdentity,
    Sandbox,
    SandboxSpec,
    WakeOnTraffic,
)
from paddock.resources.meta import Key, ObjectMeta, with_meta
from paddock.resources.tokens import TokenSeed, hashed
from paddock.resources.transitions.claim import Fit, Terms, claimed

log = logging.getLogger(__name__)

MAX_TIMEOUT_SECONDS = 30 * 24 * 3600
MAX_METADATA_BYTES = 16 * 1024
MAX_ENV_BYTES = 128 * 1024
CLEANUP_SECONDS = 5.0
"""How long a client whose claim failed waits for what is left of it to be gone."""
_CLAIMS = metrics.counter("paddock_claims_total", "Claims by where they came from.", ("source",))
_SECONDS = metrics.histogram("paddock_claim_seconds", "From wish to sandbox.", ("source",))


class Claims:
    """Hands sandboxes out."""

    def __init__(
        self,
        *,
        provider: Provider,
        pool_members: PoolMembers,
        resolver: TemplateResolver,
        reservations: QuotaReservations,
        cleanup: ClaimCleanup,
        limiter: FairLimiter,
        agent: ClaimAgent,
        overrides: ClaimOverrides,
        announcer: Announcer,
        seed: TokenSeed,
        clock: Clock,
        environments: EnvironmentSource | None = None,
        idempotency_keys: IdempotencyKeys | None = None,
        max_timeout_seconds: int = MAX_TIMEOUT_SECONDS,
    ) -> None:
        self._provider = provider
        self._pool_members = pool_members
        self._resolver = resolver
        self._reservations = reservations
        self._limiter = limiter
        self._agent = agent
        self._overrides = overrides
        self._announcer = announcer
        self._seed = seed
        self._clock = clock
        self._environments = environments
        self._idempotency_keys = idempotency_keys
        """Needed where other processes may be sent the same idempotency key."""
        self._max_timeout = max_timeout_seconds
        self._cleanup = cleanup
        self._running: dict[tuple[str, str], tuple[str, asyncio.Task[Sandbox]]] = {}
        """Claims under way by team and idempotency key, each with what was asked."""

    async def create(self, caller: Caller, request: NewSandbox) -> Sandbox:
        """Give the caller a sandbox that answers."""
        caller.must_write()
        self.check(request)
        target = self._resolver.resolve(caller, request.template)
        if request.image:
            self._overrides.must_allow(request.image)
            if target.checkpoint is not None or target.env is not None:
                problem = FieldProblem("image", "cannot be chosen for a snapshot or an environment")
                raise InvalidError(str(problem), problems=[problem])
        if not request.idempotency_key:
            return await self._claim(caller, request, target)
        return await self._once(caller, request, target)

    def check(self, request: NewSandbox) -> None:
        """Refuse what can be seen to be wrong without looking anything up."""
        seconds = request.timeout_seconds
        if seconds is not None and not 0 < seconds <= self._max_timeout:
            problem = FieldProblem("timeout", f"between 1 and {self._max_timeout} seconds")
            raise InvalidError(str(problem), problems=[problem])
        for path, limit, given in (
            ("metadata", MAX_METADATA_BYTES, request.metadata),
            ("envVars", MAX_ENV_BYTES, request.env_vars),
        ):
            size = sum(len(key) + len(value) for key, value in given.items())
            if size > limit:
                problem = FieldProblem(path, f"{size} characters; at most {limit} are kept")
                raise InvalidError(str(problem), problems=[problem])
        for name, value in request.env_vars.items():
            if not name or "=" in name or "\0" in name + value:
                what = "a value cannot hold NUL" if "\0" in value else "not a name for a variable"
                problem = FieldProblem(f"envVars[{name!r}]", what)
                raise InvalidError(str(problem), problems=[problem])

    async def _once(self, caller: Caller, request: NewSandbox, target: ClaimTarget) -> Sandbox:
        """Join a claim under way with the same key, or give what it once made."""
        key = (caller.team, request.idempotency_key)
        asked = request_hash(request)
        first, task = self._running.get(key, (asked, None))
        known = self._provider.informer(Sandbox).by_index(indexes.IDEMPOTENCY_KEY, key)
        if task is None and known and (claim := known[0].spec.claim) is not None:
            first = claim.idempotency_hash or asked
        if first != asked:
            raise ConflictError("the same idempotency key was used for another request")
        if task is None:
            made = self._again(known[0]) if known else None
            work = made or self._first(caller, request, target, asked)
            task = asyncio.get_running_loop().create_task(work, name=f"claim {key}")
            self._running[key] = (asked, task)
            task.add_done_callback(lambda _: self._running.pop(key, None))
        # The claim goes on if this caller hangs up: a retry with the same key will ask for it.
        return await asyncio.shield(task)

    async def _first(
        self, caller: Caller, request: NewSandbox, target: ClaimTarget, asked: str
    ) -> Sandbox:
        """Claim, if no other process does or did with this key; else wait for what it made."""
        if self._idempotency_keys is None:
            return await self._claim(caller, request, target)
        seconds = request.claim_timeout_seconds
        first = await self._idempotency_keys.enter(
            caller.team, request.idempotency_key, asked, seconds=seconds
        )
        if isinstance(first, Sandbox):
            claim = first.spec.claim
            if claim is not None and claim.idempotency_hash not in ("", asked):
                raise ConflictError("the same idempotency key was used for another request")
            return await self._again(first)
        try:
            return await self._claim(caller, request, target, until=first.until + MARGIN_SECONDS)
        except (asyncio.CancelledError, Exception):
            # The next may try as soon as nothing of this one can be left.
            self._cleanup.after(partial(self._idempotency_keys.leave, first))
            raise

    async def _again(self, sandbox: Sandbox) -> Sandbox:
        if sandbox.is_deleting:
            raise ConflictError("the sandbox that this key made has been killed since")
        if sandbox.spec.paused:
            return sandbox
        ready = await self._provider.waits.ready(sandbox).wait(60)
        template = ready.spec.template
        if template is not None:
            await self._agent.configure(ready, template)
            if self._overrides.can_resize(ready, template):
                await self._overrides.resize(ready, template)
        return ready

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
        asked = request_hash(request) if request.idempotency_key else ""
        fit = self._overrides.fit(target.template, image=request.image, resources=request.resources)
        terms = self._terms(caller, request, fit, asked)
        lock = terms.identity.lock
        await self._reservations.reserve(caller, lock, footprint(fit.size))
        unclear: list[Sandbox] = []
        try:
            fits = not fit.obstacle and (resizes or fit.resources is None)
            pool = target.pool if fits else None
            target = structs.replace(target, template=fit.template)
            sandbox, source = await self._obtain(caller, request, target, terms, pool, unclear)
        except (asyncio.CancelledError, Exception):
            if unclear:
                # Whether something of ours is in the store is not known: its place stays taken.
                self._cleanup.begin(*unclear)
            else:
                self._reservations.release(lock)
            raise
        if source == REMOTE:
            # Its own cluster has handed it over, and counts it.
            self._reservations.release(lock)
            _CLAIMS.labels(source).inc()
            return sandbox
        try:
            self._must_be_in_time(caller.team, until)
            ready = await self._hand_over(sandbox, request, target, source)
        except UnsupportedError as error:
            await self._clean_up(sandbox, request, error)
            if source == "cold" or not resizes or fit.resources is None:
                raise
            # Its machine would not give it the size that was asked for: another is made so.
            return await self._claim(caller, request, target, resizes=False, until=until)
        except (asyncio.CancelledError, Exception) as error:
            await self._clean_up(sandbox, request, error)
            raise
        _CLAIMS.labels(source).inc()
        _SECONDS.labels(source).observe(self._clock.monotonic() - started)
        return ready

    async def _obtain(
        self,
        caller: Caller,
        request: NewSandbox,
        target: ClaimTarget,
        terms: Terms,
        pool: Key | None,
        unclear: list[Sandbox],
    ) -> tuple[Sandbox, str]:
        """Make a sandbox the caller's; what may be in the store after an error is in `unclear`."""
        try:
            async with asyncio.timeout(request.claim_timeout_seconds):
                if target.env is not None and self._environments is not None:
                    return await self._environments.obtain(
                        caller,
                        request,
                        target.env,
                        lambda pool: self._from_stock(pool, terms, unclear),
                    )
                found = await self._from_stock(pool, terms, unclear)
                if found is not None:
                    return found, "warm"
                if not request.create_on_no_stock:
                    raise RateLimitedError(
                        f"no sandbox of {request.template!r} is in stock", retry_after_seconds=1
                    )
                await self._limiter.acquire(caller.team)
                found = await self._from_stock(pool, terms, unclear)
                if found is not None:
                    return found, "warm"
                wanted = self._fresh(request, target, terms, caller, pool)
                return await self._made(wanted, unclear), "cold"
        except TimeoutError as error:
            raise DeadlineExceededError(
                f"no sandbox could be had within {request.claim_timeout_seconds:g} s",
                hint="raise the pool's buffer, or ask for a longer claim timeout",
            ) from error

    async def _from_stock(
        self, pool: Key | None, terms: Terms, unclear: list[Sandbox]
    ) -> Sandbox | None:
        if pool is None:
            return None
        self._reservations.must_hold(terms.identity.owner)
        now = self._clock.now()
        return await warm.take(
            self._pool_members,
            self._provider,
            pool,
            lambda sandbox: claimed(sandbox, terms, now=now),
            unclear=unclear,
        )

    def _fresh(
        self,
        request: NewSandbox,
        target: ClaimTarget,
        terms: Terms,
        caller: Caller,
        pool: Key | None,
    ) -> Sandbox:
        checkpoint = target.checkpoint
        base = SandboxSpec(
            template=target.template,
            restore_from=checkpoint.status.checkpoint_id if checkpoint else None,
        )
        home = target.pool or target.template_key
        namespace = checkpoint.metadata.namespace if checkpoint else None
        wanted = Sandbox(
            metadata=ObjectMeta(
                name=request.name or f"{request.name_prefix or 'sbx-'}{terms.identity.sandbox_id}",
                namespace=namespace or (home.namespace if home else caller.team),
                finalizers=(FINALIZER_SANDBOX,),
                labels={LABEL_TEMPLATE: target.template_name},
            ),
            spec=base,
        )
        return claimed(wanted, terms, now=self._clock.now())

    def _must_be_in_time(self, team: str, until: float) -> None:
        """Refuse what was written so late that others may have counted without it."""
        self._reservations.must_hold(team)
        if self._clock.monotonic() > until:
            raise UnavailableError("the claim took too long", retry_after_seconds=1)

    async def _made(self, wanted: Sandbox, unclear: list[Sandbox]) -> Sandbox:
        if wanted.spec.claim is not None:
            self._reservations.must_hold(wanted.spec.claim.owner)
        unclear.append(wanted)
        try:
            made = await self._provider.write.create(wanted)
        except warm.AMBIGUOUS as error:
            made = await warm.written(self._provider, wanted)
            if made is None:
                raise UnavailableError("the store did not answer", retry_after_seconds=1) from error
        except PaddockError:
            unclear.pop()
            raise
        unclear.pop()
        return made

    def _terms(self, caller: Caller, request: NewSandbox, fit: Fit, asked: str) -> Terms:
        sandbox_id = request.sandbox_id or ids.sandbox_id()
        secured = request.secure
        network = request.network
        private = network is not None and not network.allow_public_traffic
        identity = ClaimIdentity(
            sandbox_id=sandbox_id,
            owner=caller.team,
            key_id=caller.key_id,
            lock=ids.uid(),
            claim_time=self._clock.now(),
            template_id=request.template,
            access_token_hash=hashed(self._seed.access_token(sandbox_id)) if secured else "",
            traffic_token_hash=hashed(self._seed.traffic_token(sandbox_id)) if private else "",
            account=self._reservations.account,
            idempotency_key=request.idempotency_key,
            idempotency_hash=asked,
            metadata=request.metadata,
            env_vars=request.env_vars,
            timeout_seconds=request.timeout_seconds,
            auto_pause=request.auto_pause,
            auto_pause_memory=request.auto_pause_memory,
        )
        wake = None
        if request.auto_resume:
            wake = WakeOnTraffic(enabled=True, timeout_seconds=request.timeout_seconds or 300)
        return Terms(
            identity=identity,
            wake=wake,
            idle_pause=request.idle_pause,
            network=network,
            resources=fit.resources,
            image=fit.image,
            paused_retention_seconds=request.paused_retention_seconds,
            pause_strategy=request.pause_strategy,
            labels=request.labels,
        )

    # ---- after the lock ------------------------------------------------------------------

    async def _hand_over(
        self, sandbox: Sandbox, request: NewSandbox, target: ClaimTarget, source: str
    ) -> Sandbox:
        """Make sure that what is handed out answers, with its token and environment."""
        if source == "cold":
            try:
                ready = await self._provider.waits.ready(sandbox).wait(
                    request.ready_timeout_seconds, written=sandbox
                )
            except (ConflictError, NotFoundError) as error:
                # It died while it was made: nothing that the caller did wrong.
                raise UnavailableError(f"the sandbox could not be made: {error.message}") from error
            await self._announcer.announce(ready)
            return ready
        template = sandbox.spec.template or target.template
        if sandbox.spec.image is not None:
            sandbox = await self._with_new_image(sandbox, request)
        before = tasks.cancel_count()
        try:
            async with asyncio.timeout(request.ready_timeout_seconds), asyncio.TaskGroup() as group:
                group.create_task(self._agent.configure(sandbox, template), name="configure")
                group.create_task(self._announcer.announce(sandbox), name="announce")
                if sandbox.spec.resources is not None:
                    group.create_task(self._overrides.resize(sandbox, template), name="resize")
                if request.network is not None:
                    group.create_task(
                        self._agent.set_network(sandbox, request.network), name="set network"
                    )
        except TimeoutError as error:
            raise DeadlineExceededError(
                f"the sandbox did not answer within {request.ready_timeout_seconds:g} s"
            ) from error
        except ExceptionGroup as errors:
            tasks.clear_cancellation(before)
            # One reason is enough for people; the first to fail ended the others.
            raise errors.exceptions[0] from errors
        return sandbox

    async def _with_new_image(self, sandbox: Sandbox, request: NewSandbox) -> Sandbox:
        """Wait for the controllers, who start a warm sandbox anew from the image of its claim."""
        try:
            return await self._provider.waits.ready(sandbox).wait(
                request.ready_timeout_seconds, written=sandbox
            )
        except (ConflictError, NotFoundError) as error:
            raise UnavailableError(
                f"image {request.image!r} could not be started: {error.message}"
            ) from error

    async def _clean_up(self, sandbox: Sandbox, request: NewSandbox, error: BaseException) -> None:
        """Remove what was claimed and never handed over."""
        log.warning(
            "claimed sandbox was not handed over",
            extra=fields(sandbox=sandbox.key, error=repr(error)),
        )
        if request.reserve_failed:
            self._cleanup.after(partial(self._keep, sandbox, request))
            return
        # Most are gone before the client hears of it; a store that is down does not hold it up.
        await asyncio.wait((self._cleanup.begin(sandbox),), timeout=CLEANUP_SECONDS)

    async def _keep(self, sandbox: Sandbox, request: NewSandbox) -> None:
        seconds = request.reserve_failed_seconds
        until = None if seconds is None else self._clock.now() + timedelta(seconds=seconds)
        await self._provider.write.mutate(
            Sandbox,
            sandbox.key,
            lambda current: _kept(current, until),
            uid=sandbox.metadata.uid,
        )


def _kept(sandbox: Sandbox, until: datetime | None) -> Sandbox:
    """Mark what nobody was given, and let it end in time."""
    if until is not None:
        spec = structs.replace(sandbox.spec, shutdown_time=until, pause_time=None)
        sandbox = structs.replace(sandbox, spec=spec)
    return with_meta(sandbox, labels={**sandbox.metadata.labels, LABEL_GIVEN_UP: "true"})


def request_hash(request: NewSandbox) -> str:
    """Tell one request from another that bears the same idempotency key."""
    return hashlib.sha256(msgspec.json.encode(request, order="deterministic")).hexdigest()[:32]
