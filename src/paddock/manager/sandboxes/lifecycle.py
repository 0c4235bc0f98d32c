"""Pause, resume, connect, extend and kill.

The first writer wins; concurrent calls in the same direction join it and share its outcome. A
resume during a pause waits for the pause; a pause during a resume is a conflict. The paused flag
and the deadlines change in one write. The action lock is taken before the write, so that no event
is missed and no opposite action can start.
"""

import asyncio
from collections.abc import Callable
from types import EllipsisType

from msgspec import structs

from paddock.cache import states
from paddock.cache.provider import Provider
from paddock.cache.states import SandboxState
from paddock.cache.waits import WaitTask
from paddock.claims.caller import Caller
from paddock.claims.cleanup import ClaimCleanup
from paddock.claims.lost_replies import AMBIGUOUS_ERRORS
from paddock.claims.ports import Announcer
from paddock.claims.quota.reservations import QuotaReservations
from paddock.kit.clock import Clock
from paddock.kit.errors import (
    ConflictError,
    DeadlineExceededError,
    FieldProblem,
    InvalidError,
    NotFoundError,
)
from paddock.manager.ports import Agent
from paddock.manager.sandboxes import recycle
from paddock.manager.sandboxes.queries import SandboxQueries, not_found
from paddock.resources.kinds.sandbox import Phase, Sandbox, SandboxSpec
from paddock.resources.transitions import deadlines
from paddock.resources.transitions.pause_strategy import strategy_for

PAUSE_SECONDS = 60.0
RESUME_SECONDS = 600.0
SLOW_SECONDS = 1.0
AGAIN_SECONDS = 0.01
LOOK_SECONDS = 1.0
"""Longest wait of a failed resume for the lookup of its write."""


class Lifecycle:
    """Changes the state and deadlines of claimed sandboxes."""

    def __init__(
        self,
        *,
        provider: Provider,
        queries: SandboxQueries,
        reservations: QuotaReservations,
        cleanup: ClaimCleanup,
        agent: Agent,
        announcer: Announcer,
        clock: Clock,
        max_timeout_seconds: int,
    ) -> None:
        self._provider = provider
        self._queries = queries
        self._reservations = reservations
        self._cleanup = cleanup
        self._agent = agent
        self._announcer = announcer
        self._clock = clock
        self._max_timeout = max_timeout_seconds

    # ---- pause and resume ----------------------------------------------------------------

    async def pause(
        self,
        caller: Caller,
        sandbox_id: str,
        *,
        memory: bool = True,
        retention_seconds: int | EllipsisType | None = ...,
    ) -> Sandbox:
        """Pause, and return when it is paused; `ConflictError` if it is paused already."""
        caller.require("create", "sandboxes/pause")
        sandbox = self._queries.find(caller, sandbox_id)
        if states.state(sandbox, self._clock.now()) is SandboxState.PAUSED and sandbox.spec.paused:
            raise ConflictError(f"sandbox {sandbox_id} is paused already")
        _require(states.pausable(sandbox, self._clock.now()), sandbox_id, "paused")

        def flagged(spec: SandboxSpec) -> SandboxSpec:
            if spec.paused:
                return spec
            if not isinstance(retention_seconds, EllipsisType):
                spec = structs.replace(spec, paused_retention_seconds=retention_seconds)
            spec = structs.replace(spec, pause_strategy=strategy_for(spec, memory=memory))
            return deadlines.paused(spec, now=self._clock.now())

        with self._provider.waits.pause(sandbox) as task:
            written = await self._write(sandbox, flagged)
            paused = await task.wait(PAUSE_SECONDS, written=written)
        await self._announcer.announce(paused)
        return paused

    async def resume(
        self,
        caller: Caller,
        sandbox_id: str,
        *,
        timeout_seconds: int,
        auto_pause: bool | None = None,
    ) -> Sandbox:
        """Resume, and return when it runs; `ConflictError` if it runs already."""
        caller.require("create", "sandboxes/resume")
        self._check(timeout_seconds)
        sandbox = self._queries.find(caller, sandbox_id)
        if states.state(sandbox, self._clock.now()) in (
            SandboxState.RUNNING,
            SandboxState.CREATING,
        ):
            raise ConflictError(f"sandbox {sandbox_id} is running already")
        resumed = await self._wake(caller, sandbox, timeout_seconds, auto_pause=auto_pause)
        await self._announcer.announce(resumed)
        return resumed

    async def connect(
        self, caller: Caller, sandbox_id: str, *, timeout_seconds: int
    ) -> tuple[Sandbox, bool]:
        """Extend a running sandbox or resume a paused one; return whether it was resumed."""
        caller.require("create", "sandboxes/connect")
        self._check(timeout_seconds)
        sandbox = self._queries.find(caller, sandbox_id)
        now = self._clock.now()
        if states.state(sandbox, now) in (SandboxState.RUNNING, SandboxState.CREATING):
            written = await self._write(
                sandbox,
                lambda spec: (
                    spec
                    if spec.paused
                    else deadlines.extended(spec, now=now, seconds=timeout_seconds)
                ),
            )
            if not written.spec.paused:
                return written, False
            # It was paused meanwhile: resume it.
            sandbox = written
        resumed = await self._wake(caller, sandbox, timeout_seconds)
        await self._announcer.announce(resumed)
        return resumed, True

    async def wake(self, sandbox: Sandbox) -> Sandbox:
        """Resume a sandbox on incoming traffic; its deadline follows the wake rules."""
        claim = sandbox.spec.claim
        if claim is None:
            raise NotFoundError(f"sandbox {sandbox.key} is not claimed")
        return await self._wake(Caller(claim.owner, claim.key_id), sandbox, None)

    async def _wake(
        self,
        caller: Caller,
        sandbox: Sandbox,
        timeout_seconds: int | None,
        *,
        auto_pause: bool | None = None,
    ) -> Sandbox:
        current, task = await self._lock_resume(sandbox)
        claim = current.spec.claim

        def running(spec: SandboxSpec) -> SandboxSpec:
            if not spec.paused or spec.claim is None:
                return spec
            self._reservations.require_valid_share(spec.claim.owner)
            identity = structs.replace(spec.claim, running_account=self._reservations.account)
            if auto_pause is not None:
                identity = structs.replace(identity, auto_pause=auto_pause)
            spec = structs.replace(spec, claim=identity)
            if timeout_seconds is None:
                return deadlines.woken(spec, now=self._clock.now())
            return deadlines.resumed(spec, now=self._clock.now(), seconds=timeout_seconds)

        with task:
            if claim is None:
                raise not_found(str(sandbox.key))
            _require(states.resumable(current, self._clock.now()), claim.sandbox_id, "resumed")
            owner = Caller(claim.owner, claim.key_id, caller.role)
            await self._reservations.reserve_resume(owner, claim.lock)
            started = self._clock.monotonic()
            try:
                written = await self._write(current, running)
            except (asyncio.CancelledError, *AMBIGUOUS_ERRORS):
                # It may have been written: the quota is released when the store shows it was not.
                lookup = self._cleanup.resolve_resume(current)
                await asyncio.wait((lookup,), timeout=LOOK_SECONDS)
                raise
            except Exception:
                self._reservations.cancel_resume(claim.lock)
                raise
            resumed = await task.wait(RESUME_SECONDS, written=written)
        if timeout_seconds is None or self._clock.monotonic() - started < SLOW_SECONDS:
            return resumed
        # The timeout counts from now: the time of the resume is not part of it.
        now = self._clock.now()
        return await self._write(
            resumed, lambda spec: deadlines.extended(spec, now=now, seconds=timeout_seconds)
        )

    async def _lock_resume(self, sandbox: Sandbox) -> tuple[Sandbox, WaitTask[Sandbox]]:
        """Take the lock for resuming, after a pause in progress is complete."""
        until = self._clock.monotonic() + PAUSE_SECONDS
        while True:
            current = await self._when_paused(sandbox)
            try:
                return current, self._provider.waits.resume(current)
            except ConflictError:
                # A waiter for the same pause still holds the lock, or it is paused again.
                if self._clock.monotonic() >= until:
                    raise
            await asyncio.sleep(AGAIN_SECONDS)

    async def _when_paused(self, sandbox: Sandbox) -> Sandbox:
        """Wait until a pause in progress is complete."""
        current = self._provider.sandbox(sandbox.key) or sandbox
        if states.state(current, self._clock.now()) is not SandboxState.PAUSING:
            return current
        with self._provider.waits.pause(current) as task:
            try:
                return await task.wait(PAUSE_SECONDS)
            except DeadlineExceededError as error:
                raise ConflictError(f"sandbox {sandbox.key} is still being paused") from error

    # ---- deadlines -----------------------------------------------------------------------

    async def set_timeout(
        self, caller: Caller, sandbox_id: str, *, timeout_seconds: int
    ) -> Sandbox:
        """Set the end of a running sandbox to so many seconds from now, earlier or later."""
        caller.require("create", "sandboxes/timeout")
        if timeout_seconds:
            self._check(timeout_seconds)
        sandbox = self._running(caller, sandbox_id)
        now = self._clock.now()
        written = await self._write(
            sandbox,
            lambda spec: deadlines.with_timeout(
                _unpaused(spec, sandbox_id), now=now, seconds=timeout_seconds
            ),
        )
        if not timeout_seconds:
            # It ends now: gateways must not route to it until their watch catches up.
            await self._announcer.announce(written)
        return written

    async def refresh(self, caller: Caller, sandbox_id: str, *, seconds: int) -> Sandbox:
        """Extend the end of a running sandbox to at least so many seconds from now."""
        caller.require("create", "sandboxes/refreshes")
        self._check(seconds)
        sandbox = self._running(caller, sandbox_id)
        now = self._clock.now()
        return await self._write(
            sandbox,
            lambda spec: deadlines.extended(_unpaused(spec, sandbox_id), now=now, seconds=seconds),
        )

    def _running(self, caller: Caller, sandbox_id: str) -> Sandbox:
        sandbox = self._queries.find(caller, sandbox_id)
        if sandbox.spec.paused:
            raise not_found(sandbox_id)
        return sandbox

    def _check(self, timeout_seconds: int) -> None:
        if not 0 < timeout_seconds <= self._max_timeout:
            problem = FieldProblem("timeout", f"between 1 and {self._max_timeout} seconds")
            raise InvalidError(str(problem), problems=[problem])

    # ---- kill -----------------------------------------------------------------------------

    async def kill(self, caller: Caller, sandbox_id: str) -> None:
        """Kill a sandbox, running or paused; it is gone for all clients when this returns.

        If its pool recycles, the sandbox is reset and returned to the pool.
        """
        caller.require("delete", "sandboxes")
        sandbox = self._queries.find_owned(caller, sandbox_id)
        if sandbox.status.phase is not Phase.FAILED or sandbox.is_deleting:
            sandbox = self._queries.find(caller, sandbox_id)
        # A failed sandbox counts against its owner's quota until it is killed.
        ended = await recycle.return_to_pool(self._provider, sandbox, now=self._clock.now())
        if ended is None:
            ended = await self._provider.write.delete(sandbox)
        await self._announcer.announce_end(sandbox, ended.metadata.resource_version)

    async def _write(
        self, sandbox: Sandbox, change: Callable[[SandboxSpec], SandboxSpec]
    ) -> Sandbox:
        """Change the spec; on a conflict read it again and reapply the change."""

        def changed(current: Sandbox) -> Sandbox:
            if current.is_deleting:
                raise not_found(str(sandbox.key))
            return structs.replace(current, spec=change(current.spec))

        return await self._provider.write.mutate(
            Sandbox, sandbox.key, changed, uid=sandbox.metadata.uid, attempts=100
        )


def _unpaused(spec: SandboxSpec, sandbox_id: str) -> SandboxSpec:
    """Raise if the spec was paused since it was read: a paused sandbox has no timeout."""
    if spec.paused:
        raise not_found(sandbox_id)
    return spec


def _require(verdict: states.Eligibility, sandbox_id: str, what: str) -> None:
    if not verdict:
        raise ConflictError(f"sandbox {sandbox_id} cannot be {what}: {verdict.reason}")
