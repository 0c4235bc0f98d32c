"""Reads about sandboxes: get, list, usage samples, logs. Changes are in `lifecycle`."""

from datetime import UTC, datetime

from paddock.cache import states
from paddock.cache.provider import Provider
from paddock.cache.states import SandboxState
from paddock.claims.caller import Caller
from paddock.kit.clock import Clock
from paddock.kit.errors import NotFoundError
from paddock.manager.ports import Agent
from paddock.manager.sandboxes import history, paging
from paddock.manager.sandboxes.requests import LogEntry, SandboxFilter, SandboxPage, UsageSample
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.kinds.template_build import LABEL_BUILD

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class SandboxQueries:
    """Finds and lists claimed sandboxes, and reads their usage and logs."""

    def __init__(self, provider: Provider, agent: Agent, clock: Clock) -> None:
        self._provider = provider
        self._agent = agent
        self._clock = clock

    async def get(self, caller: Caller, sandbox_id: str) -> Sandbox:
        """Return a caller's live sandbox; see `find`."""
        return self.find(caller, sandbox_id)

    def find(self, caller: Caller, sandbox_id: str) -> Sandbox:
        """Return a caller's live sandbox.

        Unknown ids, other teams' sandboxes and dead ones raise the same `NotFoundError`.
        """
        sandbox = self.find_owned(caller, sandbox_id)
        if states.state(sandbox, self._clock.now()) is SandboxState.DEAD:
            raise not_found(sandbox_id)
        return sandbox

    def find_owned(self, caller: Caller, sandbox_id: str) -> Sandbox:
        """Return a caller's sandbox, live or dead."""
        # Older clients append their client id to the sandbox's.
        public_id = sandbox_id.partition("-")[0]
        sandbox = self._provider.claimed_sandbox(public_id)
        if sandbox is None or sandbox.spec.claim is None or is_of_build(sandbox):
            raise not_found(sandbox_id)
        if not caller.may_use(sandbox.spec.claim):
            raise not_found(sandbox_id)
        return sandbox

    def find_by_id(self, sandbox_id: str) -> Sandbox | None:
        """Return a live sandbox of any team: for gateways and other control planes."""
        sandbox = self._provider.claimed_sandbox(sandbox_id)
        if sandbox is None or states.state(sandbox, self._clock.now()) is SandboxState.DEAD:
            return None
        return sandbox

    def all(self, caller: Caller, wanted: SandboxFilter) -> tuple[Sandbox, ...]:
        """Return a caller's sandboxes, oldest first."""
        found = (
            sandbox
            for sandbox in self._provider.sandboxes(caller.team)
            if self._matches(sandbox, wanted)
            and not is_of_build(sandbox)
            and _is_visible(caller, sandbox)
        )
        return tuple(sorted(found, key=_position))

    def page(
        self,
        caller: Caller,
        wanted: SandboxFilter,
        *,
        limit: int,
        token: str | None,
        ascending: bool,
    ) -> SandboxPage:
        """Return one page of a caller's sandboxes."""
        found = self.all(caller, wanted)
        items, following = paging.page(
            ((_position(sandbox), sandbox) for sandbox in found),
            limit=limit,
            token=token,
            ascending=ascending,
        )
        running = sum(states.is_running_or_pausing(sandbox) for sandbox in found)
        return SandboxPage(items, following, running)

    def _matches(self, sandbox: Sandbox, wanted: SandboxFilter) -> bool:
        claim = sandbox.spec.claim
        state = states.state(sandbox, self._clock.now())
        # A sandbox that is still being created is not listed: no client has received it yet.
        if claim is None or state in (SandboxState.DEAD, SandboxState.CREATING):
            return False
        shown = "running" if state is SandboxState.RUNNING else "paused"
        if state is SandboxState.PAUSING:
            # Its processes run until the pause is complete.
            shown = "running"
        if shown not in wanted.states:
            return False
        if wanted.template is not None and claim.template_id != wanted.template:
            return False
        if wanted.started_after is not None and claim.claim_time < wanted.started_after:
            return False
        return all(claim.metadata.get(key) == value for key, value in wanted.metadata.items())

    async def metrics(
        self,
        caller: Caller,
        sandbox_id: str,
        *,
        start_unix: int | None = None,
        end_unix: int | None = None,
    ) -> tuple[UsageSample, ...]:
        """Return usage samples of a sandbox, oldest first."""
        sandbox = self.find(caller, sandbox_id)
        return await self._agent.samples(
            sandbox, start=_from_unix(start_unix), end=_from_unix(end_unix)
        )

    async def logs(
        self, caller: Caller, sandbox_id: str, *, since_unix_millis: int | None, limit: int
    ) -> tuple[LogEntry, ...]:
        """Return the last log lines of a sandbox, oldest first."""
        sandbox = self.find(caller, sandbox_id)
        since = None if since_unix_millis is None else _from_unix(since_unix_millis / 1000)
        lines = await self._agent.logs(sandbox, since=since, limit=limit)
        return history.merged(history.recorded_events(sandbox, since=since), lines, limit=limit)


def not_found(sandbox_id: str) -> NotFoundError:
    """Return the error for a sandbox that does not exist for this caller."""
    return NotFoundError(f"sandbox {sandbox_id!r} was not found")


def is_of_build(sandbox: Sandbox) -> bool:
    """Whether a template is built in this sandbox. Clients do not see it."""
    return LABEL_BUILD in sandbox.metadata.labels


def _is_visible(caller: Caller, sandbox: Sandbox) -> bool:
    claim = sandbox.spec.claim
    return claim is not None and (not caller.scopes or caller.may_use(claim))


def _position(sandbox: Sandbox) -> paging.Position:
    claim = sandbox.spec.claim
    return (claim.claim_time, claim.sandbox_id) if claim else (_EPOCH, sandbox.metadata.name)


def _from_unix(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)
