"""The Store port over a working set in memory; base of the memory and sqlite backends.

A write is decided at once against the newest state, then made durable by the journal, and only
then becomes visible and is acknowledged. A response that depends on a write which is not durable
yet (such as a conflict with it) waits for it: clients never see a write that a crash could still
undo, and a read after a conflict returns the version that won.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Protocol, cast

from paddock.kit import ids
from paddock.kit.clock import Clock, system
from paddock.kit.errors import (
    AlreadyExistsError,
    PaddockError,
    UnavailableError,
)
from paddock.resources.kinds.builtin import Event, Namespace
from paddock.resources.meta import Key, R, Resource, with_meta
from paddock.resources.registry import ALL
from paddock.resources.selectors import FieldSelector, LabelSelector
from paddock.store import garbage, namespaces, semantics
from paddock.store.port import Page, Propagation, WatchEvent
from paddock.store.selection import predicate
from paddock.store.tokens import decode_token, parse_version
from paddock.store.transaction import Transaction
from paddock.store.working_set import Mutation, Place, WorkingSet

log = logging.getLogger(__name__)

KINDS: tuple[type[Resource], ...] = tuple(info.cls for info in ALL)
EVENT_TTL = timedelta(hours=1)
MAX_EVENTS = 10_000
_LONG_AGO = datetime.min.replace(tzinfo=UTC)


class WriteJournal(Protocol):
    """Makes decided changes durable, in order, and visible after that."""

    async def commit(self, mutations: Sequence[Mutation]) -> None:
        """Return when the mutations are durable and visible; `UnavailableError` if that fails."""
        ...

    async def close(self) -> None:
        """Finish commits in flight and release resources."""
        ...


class EmbeddedStore:
    """A store that keeps every object in this process."""

    def __init__(
        self,
        working: WorkingSet,
        journal: WriteJournal,
        *,
        clock: Clock | None = None,
        enforce_namespaces: bool = False,
    ) -> None:
        self._working = working
        self._journal = journal
        self._clock = clock or system()
        self._enforce_namespaces = enforce_namespaces
        self._backlog: deque[str | Place] = deque()
        self._owners_to_check: dict[Place, None] = {}
        self._collecting: asyncio.Task[None] | None = None
        self._is_closed = False

    # ---- reading -------------------------------------------------------------------------

    async def get(self, kind: type[R], key: Key) -> R:
        return semantics.found(kind, key, self._working.table(kind).objects.get(key))

    async def list(
        self,
        kind: type[R],
        *,
        namespace: str | None = None,
        labels: LabelSelector | None = None,
        fields: FieldSelector | None = None,
        limit: int | None = None,
        continue_token: str = "",
    ) -> Page[R]:
        at, after = decode_token(continue_token) if continue_token else (None, None)
        return self._working.table(kind).page(
            namespace=namespace,
            matches=predicate(labels=labels, fields=fields),
            limit=limit or None,
            at=at,
            after=after,
        )

    def watch(
        self,
        kind: type[R],
        *,
        since: str | None = None,
        namespace: str | None = None,
        labels: LabelSelector | None = None,
        fields: FieldSelector | None = None,
    ) -> AsyncGenerator[WatchEvent[R], None]:
        version = parse_version(since) if since else 0
        return self._working.table(kind).watch(
            version or None,
            namespace=namespace,
            matches=predicate(namespace=namespace, labels=labels, fields=fields),
        )

    # ---- writing -------------------------------------------------------------------------

    async def create(self, obj: R, *, with_status: bool = False, dry_run: bool = False) -> R:
        kind, namespace, uid = type(obj), obj.metadata.namespace, ids.uid()

        def decide(tx: Transaction) -> R:
            base = obj.metadata.generate_name[: semantics.MAX_GENERATED_BASE]
            new = obj
            if base and not obj.metadata.name:
                new = semantics.named(obj, tx.free_suffix(kind, namespace, base))
            new = semantics.prepare_create(new, uid=uid, now=tx.now, with_status=with_status)
            if self._enforce_namespaces:
                namespaces.check_namespace(tx, new)
            if tx.get(kind, new.key) is not None:
                raise AlreadyExistsError(f"{kind.KIND} {new.key} already exists")
            stored = tx.put(new)
            garbage.check_owners_later(tx, stored)
            return stored

        return await self._write(decide, dry_run_version="" if dry_run else None)

    async def update(self, obj: R, *, dry_run: bool = False) -> R:
        def decide(tx: Transaction) -> R:
            current = tx.get(type(obj), obj.key)
            new = semantics.prepare_update(current, obj)
            if current is None or new is current:
                return new
            stored = garbage.finish_if_released(tx, new)
            if new.metadata.owner_references is not current.metadata.owner_references:
                garbage.check_owners_later(tx, stored)
            return stored

        return await self._write(decide, dry_run_version=_version_if(dry_run, obj))

    async def update_status(self, obj: R, *, dry_run: bool = False) -> R:
        def decide(tx: Transaction) -> R:
            current = tx.get(type(obj), obj.key)
            new = semantics.prepare_status(current, obj)
            return new if new is current else tx.put(new)

        return await self._write(decide, dry_run_version=_version_if(dry_run, obj))

    async def delete(
        self,
        kind: type[R],
        key: Key,
        *,
        uid: str | None = None,
        resource_version: str | None = None,
        propagation: Propagation = Propagation.BACKGROUND,
        dry_run: bool = False,
    ) -> R:
        read_at = ""

        def decide(tx: Transaction) -> R:
            nonlocal read_at
            current = semantics.found(kind, key, tx.get(kind, key))
            semantics.check_preconditions(current, uid=uid, resource_version=resource_version)
            read_at = current.metadata.resource_version
            if self._enforce_namespaces and isinstance(current, Namespace):
                return cast("R", namespaces.begin_delete(tx, current))
            return garbage.begin_delete(tx, current, propagation)

        result = await self._write(decide, dry_run_version=read_at if dry_run else None)
        return with_meta(result, resource_version=read_at) if dry_run else result

    async def sweep(self, now: datetime | None = None) -> int:
        """Delete expired and excess Events; returns how many. Call it every minute."""
        table = self._working.table(Event)
        moment = now or self._clock.now()
        by_age = sorted(table.objects.values(), key=_last_seen)
        excess = len(by_age) - MAX_EVENTS
        expired = [
            event
            for index, event in enumerate(by_age)
            if index < excess or _last_seen(event) <= moment - EVENT_TTL
        ]
        for start in range(0, len(expired), garbage.CHUNK):
            await self._write(lambda tx, start=start: _remove_all(tx, expired, start))
        return len(expired)

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._collecting is not None:
            await asyncio.wait([self._collecting])
        for table in self._working.tables():
            table.close()
        await self._journal.close()

    # ---- deciding and committing ---------------------------------------------------------

    async def _write(
        self, decide: Callable[[Transaction], R], *, dry_run_version: str | None = None
    ) -> R:
        while True:
            if self._is_closed:
                raise UnavailableError("the store is closed")
            tx = Transaction(self._working, self._clock.now())
            rejection: PaddockError | None = None
            result: R | None = None
            try:
                result = decide(tx)
            except PaddockError as error:
                rejection = error
            if result is not None and dry_run_version is None and tx.mutations:
                await self._commit(tx)
                return result
            if tx.depends_on is not None and not await tx.depends_on.settled():
                continue  # the commit this result depends on was rolled back
            if rejection is not None:
                raise rejection
            assert result is not None  # noqa: S101 - decide returns or raises
            if dry_run_version is not None and tx.mutations:
                return with_meta(result, resource_version=dry_run_version)
            return result

    async def _commit(self, tx: Transaction) -> None:
        if tx.backlog or tx.owners_to_check:
            garbage.collect(tx)
        await self._journal.commit(tx.mutations)
        if tx.backlog or tx.owners_to_check or self._backlog or self._owners_to_check:
            self.collect_later(tx.backlog, tx.owners_to_check)

    def collect_later(
        self, backlog: Sequence[str | Place], owners_to_check: dict[Place, None]
    ) -> None:
        """Collect dependents in a background task."""
        self._backlog.extend(backlog)
        self._owners_to_check.update(owners_to_check)
        if self._collecting is None or self._collecting.done():
            self._collecting = asyncio.get_running_loop().create_task(
                self._collect(), name="collect dependents"
            )

    def collect_uncollected(self) -> None:
        """Continue the garbage collection that an earlier process did not finish."""
        tx = Transaction(self._working, self._clock.now())
        garbage.find_uncollected(tx, self._working)
        if tx.backlog or tx.owners_to_check:
            self.collect_later(tx.backlog, tx.owners_to_check)

    async def _collect(self) -> None:
        while (self._backlog or self._owners_to_check) and not self._is_closed:
            backlog, self._backlog = self._backlog, deque()
            owners_to_check, self._owners_to_check = self._owners_to_check, {}
            tx = Transaction(self._working, self._clock.now())
            tx.backlog, tx.owners_to_check = backlog.copy(), owners_to_check.copy()
            garbage.collect(tx)
            try:
                if tx.mutations:
                    await self._journal.commit(tx.mutations)
            except UnavailableError:
                # Retried after the next successful write.
                log.warning("garbage collection postponed: the store is not writable")
                self._backlog.extend(backlog)
                self._owners_to_check.update(owners_to_check)
                return
            self._backlog.extend(tx.backlog)
            self._owners_to_check.update(tx.owners_to_check)


def _version_if(dry_run: bool, obj: Resource) -> str | None:
    return obj.metadata.resource_version if dry_run else None


def _last_seen(event: Event) -> datetime:
    return event.last_timestamp or event.metadata.creation_timestamp or _LONG_AGO


def _remove_all(tx: Transaction, expired: Sequence[R], start: int) -> R:
    last = expired[start]
    for event in expired[start : start + garbage.CHUNK]:
        current = tx.get(type(event), event.key)
        if current is not None and current.metadata.uid == event.metadata.uid:
            last = garbage.begin_delete(tx, current, Propagation.BACKGROUND)
    return last
