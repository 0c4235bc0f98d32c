"""Performs what `plan` decides for one SandboxClaim.

Each sandbox carries the claim's name and uid, so that after a crash the progress is read from the
sandboxes themselves (`progress`). `source` resolves where they come from, `acquire` acquires one.
"""

import asyncio
from collections.abc import Callable
from datetime import datetime, timedelta

from msgspec import Struct, structs

from paddock.cache.provider import Provider
from paddock.claims.overrides import ClaimOverrides
from paddock.controllers.claim import plan as steps
from paddock.controllers.claim.ports import EnvironmentQueue
from paddock.controllers.claim.progress import (
    ClaimedSandboxes,
    claimed_state,
    group_by_state,
    why_lost,
)
from paddock.controllers.claim.source import ResolvedSource, SourceResolver
from paddock.controllers.claim.status import ended, is_over, progress, updated
from paddock.controllers.claim.take_or_create import ClaimAcquirer
from paddock.engine.controller import Done, Gone, RequeueAfter, Result
from paddock.engine.recorder import Recorder
from paddock.kit.clock import Clock
from paddock.kit.errors import (
    ConflictError,
    NotFoundError,
    PaddockError,
    UnsupportedError,
)
from paddock.resources.kinds.claim import SandboxClaim, SandboxClaimStatus
from paddock.resources.kinds.sandbox import LABEL_CLAIM, LABEL_GIVEN_UP, Sandbox
from paddock.resources.meta import (
    Key,
    with_meta,
)

RETRY_SECONDS = 2.0


class _ClaimState(Struct, frozen=True, kw_only=True):
    """One claim with its sandboxes and its source, as read by one reconcile."""

    claim: SandboxClaim
    sandboxes: ClaimedSandboxes
    source: ResolvedSource


class ClaimController:
    """Reconciles SandboxClaims."""

    def __init__(
        self,
        *,
        provider: Provider,
        acquirer: ClaimAcquirer,
        overrides: ClaimOverrides,
        clock: Clock,
        recorder: Recorder,
        queue: EnvironmentQueue | None = None,
    ) -> None:
        self._queue = queue
        self._acquirer = acquirer
        self._overrides = overrides
        self._source = SourceResolver(provider, overrides)
        self.wake: Callable[[Key], None] = lambda _claim: None
        """Called with a claim's key when the queue grants it a sandbox."""
        self._provider = provider
        self._clock = clock
        self._recorder = recorder
        self._created_new: set[Key] = set()
        """Claims whose size a node has refused for a warm sandbox."""

    def claim_of_change(self, old: Sandbox | None, new: Sandbox | None) -> tuple[Key, ...]:
        """Return the claim to reconcile because the progress of one of its sandboxes changed."""
        sandbox = new or old
        name = sandbox.metadata.labels.get(LABEL_CLAIM) if sandbox is not None else None
        if sandbox is None or name is None or not self._provider.is_synced:
            return ()
        claim = self._provider.get(SandboxClaim, Key(sandbox.metadata.namespace, name))
        if claim is None or is_over(claim):
            return ()
        now = self._clock.now()
        before, after = (
            None if item is None else claimed_state(claim, item, now=now) for item in (old, new)
        )
        return () if before is after else (claim.key,)

    async def reconcile(self, key: Key) -> Result:
        """Perform the next step for one claim."""
        claim = self._provider.get(SandboxClaim, key)
        if claim is None or is_over(claim):
            self._created_new.discard(key)
            if self._queue is not None:
                self._queue.forget(key)
        # Also for a deleted claim: its lost writes would keep their place in the quota.
        await self._acquirer.lost_replies.resolve()
        if claim is None:
            return Gone()
        source = self._source.of(claim)
        now = self._clock.now()
        state = _ClaimState(claim=claim, sandboxes=self._sandboxes(claim, now), source=source)
        step = steps.plan(
            claim, state.sandboxes, target_exists=source.exists, refusal=source.refusal, now=now
        )
        match step:
            case steps.Wait(until):
                return (
                    Done() if until is None else RequeueAfter((until - now).total_seconds(), "TTL")
                )
            case steps.StartClaim():
                return await self._begin(claim, source)
            case steps.Expire():
                await self._provider.write.delete(claim)
                return Done("its TTL has expired")
            case _:
                return await self._perform(state, step)

    async def _perform(self, state: _ClaimState, step: steps.Step) -> Result:
        match step:
            case steps.FinishClaim():
                return await self._finish(state, step)
            case steps.AbandonSandboxes():
                return await self._abandon(state, step)
            case steps.Resize(sandboxes):
                return await self._resize(state, sandboxes)
            case steps.AwaitSandboxes(until):
                return await self._wait(state, until)
            case steps.AcquireMore() if state.source.env is not None and self._queue is not None:
                return await self._take_granted(state.claim, state.source.env, self._queue)
            case steps.AcquireMore(count):
                return await self._acquire_more(state, count)
            case _:
                return Done()

    def _sandboxes(self, claim: SandboxClaim, now: datetime) -> ClaimedSandboxes:
        return group_by_state(claim, self._provider.sandboxes_of_claim(claim.key), now=now)

    # ---- acquiring -----------------------------------------------------------------------

    async def _begin(self, claim: SandboxClaim, source: ResolvedSource) -> Result:
        status = structs.replace(claim.status, claim_start_time=self._clock.now())
        if claim.spec.inplace_update is not None and source.exists and not source.refusal:
            status = self._updated(claim, status, source.requirements.obstacle)
        await self._write(claim, status)
        return RequeueAfter(0.001)

    def _updated(
        self, claim: SandboxClaim, status: SandboxClaimStatus, obstacle: str
    ) -> SandboxClaimStatus:
        """Record whether warm sandboxes are updated in place, or others are created instead."""
        message = f"{obstacle}: new sandboxes are created" if obstacle else ""
        if message:
            self._recorder.normal(claim, "CreatedNew", message)
        return updated(claim, status, message, now=self._clock.now())

    async def _take_granted(self, claim: SandboxClaim, env: Key, queue: EnvironmentQueue) -> Result:
        """Take the sandboxes granted to this claim, and queue for the rest."""
        taken, problem = 0, ""
        while (pool := queue.take_granted(claim.key, env)) is not None:
            try:
                taken += await self._from_member(claim, pool)
            except PaddockError as error:
                problem = error.message
                break
            finally:
                queue.release_grant(env, pool)
        sandboxes = self._sandboxes(claim, self._clock.now())
        if problem:
            # Its grants go to other claims; it queues again with the next reconcile.
            queue.forget(claim.key)
            await self._note(claim, sandboxes, taken, problem)
            return RequeueAfter(self._retry_seconds(claim), problem)
        got = max(len(sandboxes.ready), claim.status.claimed_replicas) + len(sandboxes.pending)
        # After failures, one sandbox is enough to test whether claims succeed again.
        most = 1 if claim.status.failures else claim.spec.replicas
        queue.enqueue(
            claim.key,
            env,
            count=max(min(claim.spec.replicas - got, most), 0),
            priority=claim.spec.priority,
            since=claim.metadata.creation_timestamp or self._clock.now(),
            wake=self.wake,
        )
        if taken:
            await self._note(claim, sandboxes, taken)
        return RequeueAfter(0.001 if got >= claim.spec.replicas else self._retry_seconds(claim))

    async def _from_member(self, claim: SandboxClaim, member: Key) -> bool:
        source = self._source.member(claim, member)
        if source.refusal:
            raise UnsupportedError(f"pool {member} cannot serve this claim: {source.refusal}")
        return await self._acquirer.acquire(claim, source.requirements, source.pool, creates=False)

    async def _acquire_more(self, state: _ClaimState, count: int) -> Result:
        claim, requirements = state.claim, state.source.requirements
        creates = claim.spec.create_on_no_stock
        pool = (
            None if requirements.obstacle or claim.key in self._created_new else state.source.pool
        )
        results = await asyncio.gather(
            *(
                self._acquirer.acquire(claim, requirements, pool, creates=creates)
                for _ in range(count)
            ),
            return_exceptions=True,
        )
        taken = sum(result is True for result in results)
        problem = _problem(results)
        if taken < count:
            message = f"{count - taken} of {count} are not available yet"
            self._recorder.normal(
                claim, "NoAvailableSandboxes", f"{message}: {problem}" if problem else message
            )
        await self._note(claim, self._sandboxes(claim, self._clock.now()), taken, problem)
        return RequeueAfter(
            0.001 if taken == count else self._retry_seconds(claim), f"claimed {taken}"
        )

    def _retry_seconds(self, claim: SandboxClaim) -> float:
        started = claim.status.claim_start_time or self._clock.now()
        end = started + timedelta(seconds=claim.spec.claim_timeout_seconds)
        return max(min(RETRY_SECONDS, (end - self._clock.now()).total_seconds()), 0.01)

    # ---- until they are ready ------------------------------------------------------------

    async def _wait(self, state: _ClaimState, until: datetime) -> Result:
        claim, ready = state.claim, len(state.sandboxes.ready)
        if self._queue is not None:
            # A claim that needs no more now must not delay others in the queue.
            self._queue.forget(claim.key)
        if ready > claim.status.claimed_replicas:
            message = f"{ready} of {claim.spec.replicas} are ready"
            await self._write(
                claim, structs.replace(progress(claim, state.sandboxes), message=message)
            )
        seconds = (until - self._clock.now()).total_seconds()
        return RequeueAfter(max(seconds, 0.001), "waiting for its sandboxes")

    async def _resize(self, state: _ClaimState, sandboxes: tuple[Sandbox, ...]) -> Result:
        results = await asyncio.gather(
            *(
                self._overrides.resize(
                    item, item.spec.template or state.source.requirements.template
                )
                for item in sandboxes
            ),
            return_exceptions=True,
        )
        problem, claim = _problem(results), state.claim
        refused = tuple(
            item
            for item, result in zip(sandboxes, results, strict=True)
            if isinstance(result, UnsupportedError)
        )
        if not refused:
            if problem:
                await self._note(claim, state.sandboxes, 0, problem)
            return RequeueAfter(self._retry_seconds(claim) if problem else 0.001, problem)
        creates = state.source.env is None and claim.spec.create_on_no_stock
        if creates and claim.key not in self._created_new:
            # As for API requests: create a sandbox of that size at once.
            self._created_new.add(claim.key)
            changed = structs.replace(claim, status=self._updated(claim, claim.status, problem))
            state = structs.replace(state, claim=changed)
        return await self._abandon(
            state, steps.AbandonSandboxes(refused, is_failure=not creates), problem
        )

    async def _abandon(
        self, state: _ClaimState, step: steps.AbandonSandboxes, why: str = ""
    ) -> Result:
        """Abandon sandboxes that were not handed over: delete them, or keep them for inspection."""
        claim, now, given_up = state.claim, self._clock.now(), 0
        for sandbox in step.sandboxes:
            message = why or why_lost(sandbox, now=now)
            if not await self._release(claim, sandbox):
                continue
            given_up += 1
            self._recorder.warning(claim, "SandboxGivenUp", message)
            why = why or message
        status = structs.replace(
            progress(claim, state.sandboxes), message=f"{given_up} given up; {why}"
        )
        if step.is_failure and given_up:
            failures = status.failures + given_up
            pause = now + steps.pause_after(failures)
            status = structs.replace(status, failures=failures, backoff_until=pause)
        await self._write(claim, status)
        return RequeueAfter(0.001, f"{given_up} given up")

    async def _release(self, claim: SandboxClaim, sandbox: Sandbox) -> bool:
        def labelled(current: Sandbox) -> Sandbox:
            return with_meta(current, labels={**current.metadata.labels, LABEL_GIVEN_UP: "true"})

        write, version = self._provider.write, sandbox.metadata.resource_version
        try:
            if claim.spec.reserve_failed_sandbox:
                await write.mutate(Sandbox, sandbox.key, labelled, uid=sandbox.metadata.uid)
            else:
                await write.delete(sandbox, resource_version=version)
        except NotFoundError:
            return True
        except ConflictError:
            # It changed meanwhile and may be ready: the next reconcile reads it again.
            return False
        return True

    # ---- status --------------------------------------------------------------------------

    async def _note(
        self, claim: SandboxClaim, sandboxes: ClaimedSandboxes, taken: int, problem: str = ""
    ) -> None:
        message = f"{taken} more claimed; {problem}" if problem else f"{taken} more claimed"
        await self._write(claim, structs.replace(progress(claim, sandboxes), message=message))

    async def _finish(self, state: _ClaimState, end: steps.FinishClaim) -> Result:
        claim = state.claim
        status = ended(claim, state.sandboxes, end, now=self._clock.now())
        await self._write(claim, status)
        if end.reason == steps.UPDATE_REFUSED:
            self._recorder.warning(claim, steps.UPDATE_REFUSED, end.message)
        elif end.is_failure:
            self._recorder.warning(claim, "ClaimFailed", end.message)
        else:
            self._recorder.normal(claim, "ClaimCompleted", end.message)
        return RequeueAfter(0.001, end.message)

    async def _write(self, claim: SandboxClaim, status: SandboxClaimStatus) -> None:
        seen = structs.replace(status, observed_generation=claim.metadata.generation)
        if seen != claim.status:
            await self._provider.write.update_status(structs.replace(claim, status=seen))


def _problem(results: list[bool | BaseException] | list[BaseException | None]) -> str:
    """Return the message of the first error; raise errors that are not `PaddockError`."""
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, PaddockError):
            raise result
    return next((item.message for item in results if isinstance(item, PaddockError)), "")
