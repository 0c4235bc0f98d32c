"""From a claimed sandbox to one that a client can use: configured, routed, with its size.

If that fails, the sandbox is deleted by `cleanup`, or kept for inspection if the request says so.
"""

import asyncio
import logging
from datetime import datetime, timedelta
from functools import partial

from msgspec import structs

from paddock.cache.provider import Provider
from paddock.claims.cleanup import ClaimCleanup
from paddock.claims.network.ceilings import CeilingOf, no_ceiling
from paddock.claims.overrides import ClaimOverrides
from paddock.claims.ports import COLD, Announcer, ClaimAgent
from paddock.claims.requests import NewSandbox
from paddock.kit import tasks
from paddock.kit.clock import Clock
from paddock.kit.errors import (
    ConflictError,
    DeadlineExceededError,
    NotFoundError,
    UnavailableError,
)
from paddock.kit.logs import fields
from paddock.resources.kinds.sandbox import LABEL_GIVEN_UP, Sandbox
from paddock.resources.kinds.template import NetworkPolicy, SandboxTemplateSpec
from paddock.resources.meta import with_meta
from paddock.resources.network.effective import effective_network, owner_of

log = logging.getLogger(__name__)

CLEANUP_SECONDS = 5.0
"""Longest wait of a client, whose claim failed, for the cleanup."""


class HandOver:
    """Prepares claimed sandboxes for their clients."""

    def __init__(
        self,
        *,
        provider: Provider,
        agent: ClaimAgent,
        overrides: ClaimOverrides,
        announcer: Announcer,
        cleanup: ClaimCleanup,
        clock: Clock,
        ceiling_of: CeilingOf = no_ceiling,
    ) -> None:
        self._provider = provider
        self._agent = agent
        self._overrides = overrides
        self._announcer = announcer
        self._cleanup = cleanup
        self._clock = clock
        self._ceiling_of = ceiling_of

    def check(self, request: NewSandbox) -> None:
        """Raise `InvalidError` for a request that the runtime cannot serve."""
        if request.network is not None:
            self._agent.check_network(request.network)

    async def prepare(
        self, sandbox: Sandbox, request: NewSandbox, template: SandboxTemplateSpec, source: str
    ) -> Sandbox:
        """Return the sandbox once it answers with its token, variables, size and policy."""
        if source == COLD:
            try:
                ready = await self._provider.waits.ready(sandbox).wait(
                    request.ready_timeout_seconds, written=sandbox
                )
            except (ConflictError, NotFoundError) as error:
                # It died while it started: not an error of the caller.
                raise UnavailableError(
                    f"the sandbox could not be created: {error.message}"
                ) from error
            await self._announcer.announce(ready)
            return ready
        template = sandbox.spec.template or template
        if sandbox.spec.image is not None:
            sandbox = await self._with_new_image(sandbox, request)
        before = tasks.cancel_count()
        try:
            async with asyncio.timeout(request.ready_timeout_seconds), asyncio.TaskGroup() as group:
                group.create_task(self._agent.configure(sandbox, template), name="configure")
                group.create_task(self._announcer.announce(sandbox), name="announce")
                if sandbox.spec.resources is not None:
                    group.create_task(self._overrides.resize(sandbox, template), name="resize")
                if (policy := self._changed_network(sandbox, template)) is not None:
                    group.create_task(self._agent.set_network(sandbox, policy), name="set network")
        except TimeoutError as error:
            raise DeadlineExceededError(
                f"the sandbox did not answer within {request.ready_timeout_seconds:g} s"
            ) from error
        except ExceptionGroup as errors:
            tasks.clear_cancellation(before)
            # Report one cause: the first task to fail cancelled the others.
            raise errors.exceptions[0] from errors
        return sandbox

    def _changed_network(
        self, sandbox: Sandbox, template: SandboxTemplateSpec
    ) -> NetworkPolicy | None:
        """Return the policy of a claimed sandbox, if it differs from the one it waited with."""
        policy = effective_network(sandbox, template.network, self._ceiling_of(owner_of(sandbox)))
        spec = structs.replace(sandbox.spec, claim=None, network=None)
        waiting = structs.replace(sandbox, spec=spec)
        before = effective_network(waiting, template.network, self._ceiling_of(owner_of(waiting)))
        return None if policy == before else policy

    async def prepare_again(self, sandbox: Sandbox) -> Sandbox:
        """Return the sandbox of an earlier request with the same idempotency key, ready."""
        if sandbox.is_deleting:
            raise ConflictError("the sandbox of this idempotency key was killed")
        if sandbox.spec.paused:
            return sandbox
        ready = await self._provider.waits.ready(sandbox).wait(60)
        template = ready.spec.template
        if template is not None:
            await self._agent.configure(ready, template)
            if self._overrides.can_resize(ready, template):
                await self._overrides.resize(ready, template)
        return ready

    async def _with_new_image(self, sandbox: Sandbox, request: NewSandbox) -> Sandbox:
        """Wait for the controllers to restart a warm sandbox from the image of its claim."""
        try:
            return await self._provider.waits.ready(sandbox).wait(
                request.ready_timeout_seconds, written=sandbox
            )
        except (ConflictError, NotFoundError) as error:
            raise UnavailableError(
                f"image {request.image!r} could not be started: {error.message}"
            ) from error

    async def abort(self, sandbox: Sandbox, request: NewSandbox, error: BaseException) -> None:
        """Delete a claimed sandbox that could not be handed over, or keep it for inspection."""
        log.warning(
            "claimed sandbox was not handed over",
            extra=fields(sandbox=sandbox.key, error=repr(error)),
        )
        if request.reserve_failed:
            self._cleanup.after(partial(self._keep, sandbox, request))
            return
        # Usually it is deleted before the client has its reply; an unavailable store does not
        # delay that reply for longer.
        await asyncio.wait((self._cleanup.begin(sandbox),), timeout=CLEANUP_SECONDS)

    async def _keep(self, sandbox: Sandbox, request: NewSandbox) -> None:
        seconds = request.reserve_failed_seconds
        until = None if seconds is None else self._clock.now() + timedelta(seconds=seconds)
        await self._provider.write.mutate(
            Sandbox,
            sandbox.key,
            lambda current: _given_up(current, until),
            uid=sandbox.metadata.uid,
        )


def _given_up(sandbox: Sandbox, until: datetime | None) -> Sandbox:
    """Label a sandbox that no client received, and limit its life."""
    if until is not None:
        spec = structs.replace(sandbox.spec, shutdown_time=until, pause_time=None)
        sandbox = structs.replace(sandbox, spec=spec)
    return with_meta(sandbox, labels={**sandbox.metadata.labels, LABEL_GIVEN_UP: "true"})
