"""Snapshots and forks: stored states, and sandboxes created from them."""

import asyncio
import logging
import re
from collections.abc import Callable
from datetime import UTC, datetime

from msgspec import structs

from paddock.cache.provider import Provider
from paddock.claims.caller import Caller
from paddock.claims.engine import Claims
from paddock.claims.quota.stored import TEMPORARY_SECONDS, StoredLedger, checkpoint_holders
from paddock.claims.requests import NewSandbox
from paddock.claims.template_resolver import belongs_to_build
from paddock.kit import ids
from paddock.kit.clock import Clock
from paddock.kit.errors import (
    ConflictError,
    DiskFullError,
    FieldProblem,
    InvalidError,
    NotFoundError,
    PaddockError,
    QuotaExceededError,
)
from paddock.kit.logs import fields
from paddock.manager.sandboxes import paging
from paddock.manager.sandboxes.queries import SandboxQueries
from paddock.manager.sandboxes.requests import ForkResult
from paddock.manager.templates.registry import TemplateRegistry
from paddock.resources.kinds.checkpoint import Checkpoint, CheckpointPhase, CheckpointSpec, Content
from paddock.resources.kinds.sandbox import ClaimIdentity, Sandbox
from paddock.resources.meta import GROUP, ObjectMeta
from paddock.resources.transitions.pause_strategy import strategy_for

log = logging.getLogger(__name__)

SNAPSHOT_SECONDS = 120.0
FORK_TTL_SECONDS = TEMPORARY_SECONDS
"""How long the checkpoint of a fork is kept after it is complete."""
_NAME = re.compile(r"^(?:[a-z0-9][a-z0-9_-]*/)?[a-z0-9][a-z0-9_-]*(?::[a-z0-9_.-]+)?$")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Snapshots:
    """Stores states and creates sandboxes from them."""

    def __init__(
        self,
        *,
        provider: Provider,
        claims: Claims,
        queries: SandboxQueries,
        clock: Clock,
        stored: StoredLedger,
        registry: TemplateRegistry,
    ) -> None:
        self._provider = provider
        self._claims = claims
        self._queries = queries
        self._clock = clock
        self._stored = stored
        self._registry = registry

    async def create(
        self, caller: Caller, sandbox_id: str, *, name: str | None, memory: bool = True
    ) -> Checkpoint:
        """Store a sandbox's state and return when it is stored. The sandbox continues."""
        caller.require("create", "sandboxes/snapshots")
        sandbox = self._queries.find(caller, sandbox_id)
        names = names_of(caller, name)
        if names:
            bare = names[1].partition(":")[0]
            self._registry.check_free(caller.team, bare, for_snapshot=True)
        return await self._store(caller, sandbox, names=names, memory=memory)

    async def _store(
        self,
        caller: Caller,
        sandbox: Sandbox,
        *,
        names: tuple[str, ...] = (),
        memory: bool = True,
        ttl_seconds: int | None = None,
    ) -> Checkpoint:
        claim = sandbox.spec.claim
        contents = (Content.MEMORY, Content.FILESYSTEM) if memory else (Content.FILESYSTEM,)
        wanted = Checkpoint(
            metadata=ObjectMeta(
                generate_name=f"{sandbox.metadata.name}-", namespace=sandbox.metadata.namespace
            ),
            spec=CheckpointSpec(
                sandbox_name=sandbox.metadata.name,
                sandbox_uid=sandbox.metadata.uid,
                sandbox_id=claim.sandbox_id if claim else "",
                persistent_contents=contents,
                owner=caller.team,
                key_id=caller.key_id,
                checkpoint_id=ids.checkpoint_id("snap"),
                names=names,
                ttl_seconds_after_finished=ttl_seconds,
            ),
        )
        # The controller decides with an estimate; a full quota is refused without a write.
        self._stored.check(checkpoint_holders(wanted), 1)
        created = await self._provider.write.create(wanted)
        try:
            return await self._provider.waits.checkpoint(created).wait(
                SNAPSHOT_SECONDS, written=created
            )
        except (QuotaExceededError, DiskFullError):
            # The caller has the reason: refusals must not fill the store.
            await self._delete(created)
            raise

    async def _delete(self, checkpoint: Checkpoint) -> None:
        try:
            await self._provider.write.delete(checkpoint)
        except NotFoundError:
            return
        except PaddockError as error:
            log.warning(
                "refused checkpoint was not deleted",
                extra=fields(checkpoint=str(checkpoint.key), error=error.message),
            )

    async def fork(
        self, caller: Caller, sandbox_id: str, *, count: int, timeout_seconds: int
    ) -> tuple[ForkResult, ...]:
        """Create clones of a running sandbox from one stored state."""
        caller.require("create", "sandboxes/fork")
        sandbox = self._queries.find(caller, sandbox_id)
        claim = sandbox.spec.claim
        if sandbox.spec.paused or claim is None:
            raise ConflictError(f"sandbox {sandbox_id} is paused; only a running one is forked")
        wanted = _same_request(sandbox, claim, timeout_seconds)
        self._claims.check(wanted)
        stored = await self._store(caller, sandbox, ttl_seconds=FORK_TTL_SECONDS)
        request = structs.replace(wanted, template=stored.status.checkpoint_id)
        return tuple(
            await asyncio.gather(*(self._create_fork(caller, request) for _ in range(count)))
        )

    async def _create_fork(self, caller: Caller, request: NewSandbox) -> ForkResult:
        try:
            return ForkResult(await self._claims.create(caller, request))
        except PaddockError as error:
            return ForkResult(None, error)

    def list(
        self,
        caller: Caller,
        *,
        sandbox_id: str | None,
        name: str | None,
        limit: int,
        token: str | None,
    ) -> tuple[tuple[Checkpoint, ...], str | None]:
        """Return one page of a team's snapshots, newest first, and the token of the next page."""
        source = self._source(sandbox_id) if sandbox_id is not None else None
        found = (
            ((item.status.completion_time or _EPOCH, item.metadata.name), item)
            for item in self._provider.checkpoints(caller.team)
            if item.status.phase is CheckpointPhase.SUCCEEDED
            and not item.is_deleting
            and item.spec.ttl_seconds_after_finished is None
            and not belongs_to_build(item)
            and (source is None or source(item))
            and (name is None or name.lower() in item.spec.names)
            and (not caller.scopes or _is_visible(caller, item))
        )
        return paging.page(found, limit=limit, token=token, ascending=False)

    def _source(self, sandbox_id: str) -> Callable[[Checkpoint], bool]:
        """Return a predicate for the snapshots of one sandbox."""
        public_id = sandbox_id.partition("-")[0]
        sandbox = self._provider.claimed_sandbox(public_id)
        name = sandbox.metadata.name if sandbox is not None else None

        def is_of(item: Checkpoint) -> bool:
            # A Checkpoint created by hand may name only the object.
            return item.spec.sandbox_id == public_id or (
                not item.spec.sandbox_id and item.spec.sandbox_name == name
            )

        return is_of


def names_of(caller: Caller, name: str | None) -> tuple[str, ...]:
    """Return the names that a snapshot is found by; `InvalidError` if it cannot have this one."""
    if not name:
        return ()
    lowered = name.lower()
    if not _NAME.match(lowered):
        problem = FieldProblem("name", f"{name!r} is not [team/]name[:tag]")
        raise InvalidError(str(problem), problems=[problem])
    bare = lowered.partition("/")[2] or lowered
    if ids.is_checkpoint_id(bare.partition(":")[0]):
        problem = FieldProblem("name", f"{name!r} has the form of an id; choose another name")
        raise InvalidError(str(problem), problems=[problem])
    tagged = bare if ":" in bare else f"{bare}:default"
    untagged = (bare.partition(":")[0],) if tagged.endswith(":default") else ()
    return tuple(dict.fromkeys((f"{caller.team}/{tagged}", tagged, *untagged)))


def _is_visible(caller: Caller, checkpoint: Checkpoint) -> bool:
    """Whether the scopes of a key allow a snapshot: by one of its names."""
    names = checkpoint.spec.names or (checkpoint.metadata.name,)
    return any(caller.may("get", "checkpoints", template=name) for name in names)


def _same_request(sandbox: Sandbox, claim: ClaimIdentity, timeout_seconds: int) -> NewSandbox:
    """Return the request for a sandbox with the same settings, except for the timeout."""
    spec = sandbox.spec
    ours = f"{GROUP}/"
    return NewSandbox(
        template=claim.template_id,
        timeout_seconds=timeout_seconds,
        auto_pause=claim.auto_pause,
        auto_pause_memory=claim.auto_pause_memory,
        auto_resume=spec.wake_on_traffic is not None and spec.wake_on_traffic.enabled,
        idle_pause=spec.idle_pause,
        paused_retention_seconds=spec.paused_retention_seconds,
        pause_strategy=strategy_for(spec, memory=True),
        metadata=claim.metadata,
        env_vars=claim.env_vars,
        labels={k: v for k, v in sandbox.metadata.labels.items() if not k.startswith(ours)},
        resources=spec.resources,
        secure=bool(claim.access_token_hash),
    )
