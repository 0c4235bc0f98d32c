"""The manager: every use case of sandboxes, free of protocol.

A thin face over the modules beside it; APIs and the gateway's waker talk to this.
"""

from datetime import UTC, datetime
from types import EllipsisType

from paddock.cache import states
from paddock.cache.provider import Provider
from paddock.cache.states import SandboxState
from paddock.claims.caller import Caller
from paddock.claims.cleanup import Disowning
from paddock.claims.engine import Claims
from paddock.claims.requests import NewSandbox
from paddock.claims.template_resolver import Targets
from paddock.kit.clock import Clock
from paddock.manager.ports import Agent
from paddock.manager.sandboxes import history, paging
from paddock.manager.sandboxes.batches import Batches
from paddock.manager.sandboxes.lifecycle import Lifecycle
from paddock.manager.sandboxes.requests import (
    ForkResult,
    LogEntry,
    Sample,
    SandboxFilter,
    SandboxPage,
)
from paddock.manager.sandboxes.snapshots import Snapshots
from paddock.resources.kinds.checkpoint import Checkpoint
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.kinds.template import NetworkPolicy, SandboxTemplate


class Manager:
    """What can be asked for."""

    def __init__(
        self,
        *,
        provider: Provider,
        claims: Claims,
        lifecycle: Lifecycle,
        snapshots: Snapshots,
        targets: Targets,
        agent: Agent,
        clock: Clock,
        batches: Batches,
        disowning: Disowning,
    ) -> None:
        self.batches = batches
        self.disowning = disowning
        self._provider = provider
        self._claims = claims
        self._lifecycle = lifecycle
        self._snapshots = snapshots
        self._targets = targets
        self._agent = agent
        self._clock = clock

    # ---- sandboxes -----------------------------------------------------------------------

    async def create(self, caller: Caller, request: NewSandbox) -> Sandbox:
        """Give the caller a sandbox that answers."""
        return await self._claims.create(caller, request)

    async def get(self, caller: Caller, sandbox_id: str) -> Sandbox:
        """Find one sandbox."""
        return self._lifecycle.find(caller, sandbox_id)

    def find_by_id(self, sandbox_id: str) -> Sandbox | None:
        """Find a live sandbox of anybody's, for our own gateways."""
        sandbox = self._provider.claimed_sandbox(sandbox_id)
        if sandbox is None or states.state(sandbox, self._clock.now()) is SandboxState.DEAD:
            return None
        return sandbox

    def all(self, caller: Caller, wanted: SandboxFilter) -> tuple[Sandbox, ...]:
        """List a caller's sandboxes, oldest first."""
        found = (
            sandbox
            for sandbox in self._provider.sandboxes(caller.team)
            if self._matches(sandbox, wanted)
        )
        return tuple(sorted(found, key=_position))

    def list(
        self,
        caller: Caller,
        wanted: SandboxFilter,
        *,
        limit: int,
        token: str | None,
        ascending: bool,
    ) -> SandboxPage:
        """List a caller's sandboxes, page by page."""
        found = self.all(caller, wanted)
        items, following = paging.page(
            ((_position(sandbox), sandbox) for sandbox in found),
            limit=limit,
            token=token,
            ascending=ascending,
        )
        running = sum(not sandbox.spec.paused for sandbox in found)
        return SandboxPage(items, following, running)

    def _matches(self, sandbox: Sandbox, wanted: SandboxFilter) -> bool:
        claim = sandbox.spec.claim
        state = states.state(sandbox, self._clock.now())
        # What is still in the making is not listed: nobody was given it yet.
        if claim is None or state in (SandboxState.DEAD, SandboxState.CREATING):
            return False
        shown = "running" if state is SandboxState.RUNNING else "paused"
        if shown not in wanted.states:
            return False
        if wanted.template is not None and claim.template_id != wanted.template:
            return False
        if wanted.started_after is not None and claim.claim_time <= wanted.started_after:
            return False
        return all(claim.metadata.get(key) == value for key, value in wanted.metadata.items())

    async def pause(
        self,
        caller: Caller,
        sandbox_id: str,
        *,
        memory: bool = True,
        retention_seconds: int | EllipsisType | None = ...,
    ) -> Sandbox:
        """Pause a sandbox."""
        return await self._lifecycle.pause(
            caller, sandbox_id, memory=memory, retention_seconds=retention_seconds
        )

    async def resume(
        self,
        caller: Caller,
        sandbox_id: str,
        *,
        timeout_seconds: int,
        auto_pause: bool | None = None,
    ) -> Sandbox:
        """Resume a paused sandbox."""
        return await self._lifecycle.resume(
            caller, sandbox_id, timeout_seconds=timeout_seconds, auto_pause=auto_pause
        )

    async def connect(
        self, caller: Caller, sandbox_id: str, *, timeout_seconds: int
    ) -> tuple[Sandbox, bool]:
        """Extend a running sandbox or resume a paused one."""
        return await self._lifecycle.connect(caller, sandbox_id, timeout_seconds=timeout_seconds)

    async def wake(self, sandbox: Sandbox) -> Sandbox:
        """Resume a sandbox because traffic came for it."""
        return await self._lifecycle.wake(sandbox)

    async def set_timeout(
        self, caller: Caller, sandbox_id: str, *, timeout_seconds: int
    ) -> Sandbox:
        """Move a sandbox's end."""
        return await self._lifecycle.set_timeout(
            caller, sandbox_id, timeout_seconds=timeout_seconds
        )

    async def refresh(self, caller: Caller, sandbox_id: str, *, seconds: int) -> Sandbox:
        """Put off a sandbox's end."""
        return await self._lifecycle.refresh(caller, sandbox_id, seconds=seconds)

    async def kill(self, caller: Caller, sandbox_id: str) -> None:
        """End a sandbox."""
        await self._lifecycle.kill(caller, sandbox_id)

    async def set_network(self, caller: Caller, sandbox_id: str, policy: NetworkPolicy) -> Sandbox:
        """Replace a sandbox's egress policy."""
        return await self._lifecycle.set_network(caller, sandbox_id, policy)

    # ---- looking inside ------------------------------------------------------------------

    async def metrics(
        self,
        caller: Caller,
        sandbox_id: str,
        *,
        start_unix: int | None = None,
        end_unix: int | None = None,
    ) -> tuple[Sample, ...]:
        """Give what a sandbox used."""
        sandbox = self._lifecycle.find(caller, sandbox_id)
        return await self._agent.samples(sandbox, start=_moment(start_unix), end=_moment(end_unix))

    async def logs(
        self, caller: Caller, sandbox_id: str, *, since_unix_millis: int | None, limit: int
    ) -> tuple[LogEntry, ...]:
        """Give a sandbox's log lines."""
        sandbox = self._lifecycle.find(caller, sandbox_id)
        since = None if since_unix_millis is None else _moment(since_unix_millis / 1000)
        lines = await self._agent.logs(sandbox, since=since, limit=limit)
        return history.merged(history.of(sandbox, since=since), lines, limit=limit)

    # ---- templates and snapshots ---------------------------------------------------------

    def templates(self, caller: Caller) -> tuple[SandboxTemplate, ...]:
        """List the templates that a caller may use."""
        return self._targets.templates(caller)

    def template(self, caller: Caller, reference: str) -> SandboxTemplate:
        """Find one template."""
        return self._targets.template(caller, reference)

    async def delete_template(self, caller: Caller, reference: str) -> None:
        """Delete a snapshot or a template."""
        await self._snapshots.delete_template(caller, reference)

    async def publish_template(
        self, caller: Caller, reference: str, *, public: bool
    ) -> SandboxTemplate:
        """Let every team use a template, or no longer."""
        return await self._snapshots.publish(caller, reference, public=public)

    async def snapshot(
        self, caller: Caller, sandbox_id: str, *, name: str | None, memory: bool = True
    ) -> Checkpoint:
        """Store a sandbox's state."""
        return await self._snapshots.snapshot(caller, sandbox_id, name=name, memory=memory)

    def snapshots(
        self,
        caller: Caller,
        *,
        sandbox_id: str | None,
        name: str | None,
        limit: int,
        token: str | None,
    ) -> tuple[tuple[Checkpoint, ...], str | None]:
        """List a team's snapshots."""
        return self._snapshots.snapshots(
            caller, sandbox_id=sandbox_id, name=name, limit=limit, token=token
        )

    async def fork(
        self, caller: Caller, sandbox_id: str, *, count: int, timeout_seconds: int
    ) -> tuple[ForkResult, ...]:
        """Make clones of a running sandbox."""
        return await self._snapshots.fork(
            caller, sandbox_id, count=count, timeout_seconds=timeout_seconds
        )


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def _position(sandbox: Sandbox) -> paging.Position:
    claim = sandbox.spec.claim
    return (claim.claim_time, claim.sandbox_id) if claim else (_EPOCH, sandbox.metadata.name)


def _moment(unix: float | None) -> datetime | None:
    return None if unix is None else datetime.fromtimestamp(unix, UTC)
