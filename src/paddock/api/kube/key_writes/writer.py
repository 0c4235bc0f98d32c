"""Writes of API keys against the store: what the rules need to know, and the quota they take."""

import contextlib
from collections.abc import AsyncGenerator, Callable

from paddock.api.kube import key_access
from paddock.api.kube.key_writes import rules, sandboxes
from paddock.api.kube.key_writes.request import KeyLimits, KeyWrite
from paddock.claims.caller import Caller
from paddock.claims.quota.declared import DeclaredQuota
from paddock.claims.quota.reservations import QuotaReservations
from paddock.claims.quota.stored import StoredLedger, checkpoint_holders
from paddock.kit.clock import Clock
from paddock.kit.errors import NotFoundError, QuotaExceededError
from paddock.resources.kinds.batch import BatchSandbox
from paddock.resources.kinds.checkpoint import Checkpoint
from paddock.resources.kinds.pool import SandboxPool
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.meta import Key, Resource
from paddock.resources.selectors import FieldSelector
from paddock.store.port import Store

MAX_OBJECTS = 500
"""Objects of one kind in the namespace of a team; keys create no more."""


class KeyWrites:
    """Checks what API keys write, and reserves the quota that it needs."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        *,
        limits_of: Callable[[str], KeyLimits],
        reservations: QuotaReservations,
        declared: DeclaredQuota,
        stored: StoredLedger,
    ) -> None:
        self._store = store
        self._clock = clock
        self._limits_of = limits_of
        self._reservations = reservations
        self._declared = declared
        self._stored = stored

    async def admitted(self, caller: Caller, old: Resource | None, new: Resource) -> Resource:
        """Return the object to store; `ForbiddenError` if the key may not write it."""
        write = KeyWrite(
            caller=caller,
            limits=self._limits_of(caller.team),
            now=self._clock.now(),
            source=await self._source(new) if old is None else None,
        )
        return rules.admitted(write, old, new)

    async def _source(self, new: Resource) -> Sandbox | None:
        if not isinstance(new, Checkpoint):
            return None
        try:
            return await self._store.get(
                Sandbox, Key(new.metadata.namespace, new.spec.sandbox_name)
            )
        except NotFoundError:
            return None

    @contextlib.asynccontextmanager
    async def reserving(
        self, caller: Caller, old: Resource | None, new: Resource, *, dry_run: bool
    ) -> AsyncGenerator[None]:
        """Hold the quota that a write needs; `QuotaExceededError` if there is no room."""
        if old is None:
            await self._check_count(caller, new)
        if isinstance(new, SandboxPool | BatchSandbox):
            if isinstance(old, SandboxPool | BatchSandbox):
                self._declared.check_growth(caller, old, new)
            with self._declared.reserving(new, dry_run=dry_run):
                yield
            return
        if isinstance(new, Checkpoint) and old is None:
            self._stored.check(checkpoint_holders(new), 1)
        if isinstance(new, Sandbox) and isinstance(old, Sandbox) and sandboxes.resumes(old, new):
            async with self._resuming(old, dry_run=dry_run):
                yield
            return
        yield

    @contextlib.asynccontextmanager
    async def _resuming(self, sandbox: Sandbox, *, dry_run: bool) -> AsyncGenerator[None]:
        claim = sandbox.spec.claim
        if claim is None:
            yield
            return
        await self._reservations.reserve_resume(Caller(claim.owner, claim.key_id), claim.lock)
        is_written = False
        try:
            yield
            is_written = not dry_run
        finally:
            # If it was written nevertheless, its event counts it again.
            if not is_written:
                self._reservations.cancel_resume(claim.lock)

    async def _check_count(self, caller: Caller, new: Resource) -> None:
        namespace = new.metadata.namespace
        term = key_access.owner_term(caller, new.PLURAL, namespace)
        page = await self._store.list(
            type(new),
            namespace=namespace,
            fields=FieldSelector((term,)) if term is not None else None,
            limit=MAX_OBJECTS,
        )
        if len(page.items) >= MAX_OBJECTS:
            raise QuotaExceededError(
                f"team {caller.team} has {MAX_OBJECTS} objects of kind {new.KIND} in namespace "
                f"{namespace!r}, the most that API keys create",
                hint="delete objects that are not needed",
            )
