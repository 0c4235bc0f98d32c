"""Events: what happened to an object, shown by `kubectl describe`.

Recording never waits and never fails: events are counted in memory and written by `run`. The same
event of the same object increases the count of one Event, also after a restart. Events of one
object are rate limited. An event that cannot be written is logged and dropped: Events are
informational; no code may depend on them.
"""

import asyncio
import hashlib
import logging
from collections import OrderedDict
from datetime import datetime
from typing import TypeAlias

from msgspec import Struct, structs

from paddock.engine.queue import WorkQueue
from paddock.kit import clock as clocks
from paddock.kit import metrics
from paddock.kit.backoff import Backoff
from paddock.kit.errors import AlreadyExistsError, ConflictError, NotFoundError
from paddock.kit.logs import fields
from paddock.resources.kinds.builtin import Event, EventSource, ObjectReference
from paddock.resources.meta import ObjectMeta, Resource
from paddock.store.port import Store

log = logging.getLogger(__name__)

NORMAL = "Normal"
WARNING = "Warning"

_MESSAGE_LIMIT = 1024
_NAME_LIMIT = 200
_DROPPED = metrics.counter("paddock_events_dropped_total", "Events not recorded.", ("reason",))
_WRITTEN = metrics.counter("paddock_events_written_total", "Events written.", ("type",))
_RETRY = Backoff(base_seconds=0.2, cap_seconds=5.0)
_ATTEMPTS = 4

_Identity: TypeAlias = str


class _Entry(Struct, gc=False):
    """One Event in this process."""

    event: Event
    """As first recorded."""
    last: datetime
    """When it was recorded last."""
    unwritten: int = 0
    written_at: float | None = None
    stored: Event | None = None
    """As in the store."""


class _TokenBucket(Struct, gc=False):
    """The token bucket of one object."""

    tokens: float
    at: float


class Recorder:
    """Records events of one component."""

    def __init__(
        self,
        store: Store,
        component: str,
        *,
        instance: str = "",
        clock: clocks.Clock | None = None,
        capacity: int = 4096,
        burst: int = 25,
        refill_seconds: float = 60.0,
        settle_seconds: float = 5.0,
    ) -> None:
        self._store = store
        self._component = component
        self._instance = instance
        self._clock = clock or clocks.system()
        self._capacity = capacity
        self._burst = burst
        self._refill_seconds = refill_seconds
        self._settle_seconds = settle_seconds
        self._entries: OrderedDict[_Identity, _Entry] = OrderedDict()
        self._buckets: OrderedDict[str, _TokenBucket] = OrderedDict()
        self._queue: WorkQueue[_Identity] = WorkQueue("events", backoff=_RETRY)

    def normal(self, obj: Resource, reason: str, message: str) -> None:
        """Record something ordinary."""
        self._record(obj, NORMAL, reason, message)

    def warning(self, obj: Resource, reason: str, message: str) -> None:
        """Record something that an operator should look at."""
        self._record(obj, WARNING, reason, message)

    async def run(self) -> None:
        """Write recorded events until cancelled."""
        while True:
            identity = await self._queue.get()
            try:
                await self._flush(identity)
            finally:
                self._queue.done(identity)

    # ---- recording -----------------------------------------------------------------------

    def _record(self, obj: Resource, kind: str, reason: str, message: str) -> None:
        message = message[:_MESSAGE_LIMIT]
        identity = self._identity(obj, kind, reason, message)
        entry = self._entries.get(identity)
        if entry is None:
            if not self._make_room() or not self._is_within_rate(obj):
                return
            entry = _Entry(self._event(obj, kind, reason, message, identity), self._now())
            self._entries[identity] = entry
        self._entries.move_to_end(identity)
        entry.unwritten += 1
        entry.last = self._now()
        # The first is written at once; repetitions are batched for a while.
        seconds = 0.0
        if entry.written_at is not None:
            seconds = entry.written_at + self._settle_seconds - self._clock.monotonic()
        self._queue.add_after(identity, seconds)

    def _make_room(self) -> bool:
        while len(self._entries) >= self._capacity:
            oldest = next(iter(self._entries))
            if self._entries[oldest].unwritten:
                _DROPPED.labels("full").inc()
                return False
            del self._entries[oldest]
        return True

    def _is_within_rate(self, obj: Resource) -> bool:
        uid, now = obj.metadata.uid, self._clock.monotonic()
        known = self._buckets.pop(uid, None)
        if known is None:
            known = _TokenBucket(self._burst, now)
        refilled = known.tokens + (now - known.at) / self._refill_seconds
        known.tokens, known.at = min(float(self._burst), refilled), now
        self._buckets[uid] = known
        if len(self._buckets) > self._capacity:
            self._buckets.popitem(last=False)
        if known.tokens < 1:
            _DROPPED.labels("rate").inc()
            return False
        known.tokens -= 1
        return True

    def _identity(self, obj: Resource, kind: str, reason: str, message: str) -> _Identity:
        parts = "\0".join((self._component, obj.KIND, obj.metadata.uid, kind, reason, message))
        return hashlib.blake2s(parts.encode(), digest_size=8).hexdigest()

    def _event(
        self, obj: Resource, kind: str, reason: str, message: str, identity: _Identity
    ) -> Event:
        meta, now = obj.metadata, self._now()
        return Event(
            metadata=ObjectMeta(
                name=f"{meta.name[:_NAME_LIMIT]}.{identity}", namespace=meta.namespace or "default"
            ),
            involved_object=ObjectReference(
                api_version=obj.API_VERSION,
                kind=obj.KIND,
                namespace=meta.namespace,
                name=meta.name,
                uid=meta.uid,
            ),
            reason=reason,
            message=message,
            type=kind,
            first_timestamp=now,
            last_timestamp=now,
            source=EventSource(component=self._component),
            reporting_component=self._component,
            reporting_instance=self._instance,
        )

    def _now(self) -> datetime:
        return self._clock.now().replace(microsecond=0)

    # ---- writing -------------------------------------------------------------------------

    async def _flush(self, identity: _Identity) -> None:
        entry = self._entries.get(identity)
        if entry is None or not entry.unwritten:
            return
        taken = entry.unwritten
        try:
            await self._write(entry, taken)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - a task's root: Events are best effort
            self._give_up_or_retry(identity, entry, error)
            return
        self._queue.forget(identity)
        entry.unwritten -= taken
        entry.written_at = self._clock.monotonic()
        _WRITTEN.labels(entry.event.type).inc()

    async def _write(self, entry: _Entry, more: int) -> None:
        try:
            if entry.stored is None:
                new = structs.replace(entry.event, count=more, last_timestamp=entry.last)
                entry.stored = await self._store.create(new)
            else:
                entry.stored = await self._store.update(_more(entry.stored, more, entry.last))
        except (AlreadyExistsError, ConflictError):
            # Recorded before a restart of this component, or by another replica.
            known = await self._store.get(Event, entry.event.key)
            entry.stored = await self._store.update(_more(known, more, entry.last))
        except NotFoundError:
            if entry.stored is None:
                raise  # The namespace is missing.
            # Deleted meanwhile: the count starts again.
            entry.stored = None
            entry.event = structs.replace(entry.event, first_timestamp=entry.last)
            await self._write(entry, more)

    def _give_up_or_retry(self, identity: _Identity, entry: _Entry, error: Exception) -> None:
        facts = fields(
            object=f"{entry.event.involved_object.kind} {entry.event.involved_object.name}",
            reason=entry.event.reason,
            error=repr(error),
        )
        if self._queue.failures(identity) + 1 < _ATTEMPTS:
            log.debug("event not written yet", extra=facts)
            self._queue.retry(identity)
            return
        log.warning("event not written", extra=facts)
        _DROPPED.labels("error").inc()
        self._queue.forget(identity)
        self._entries.pop(identity, None)


def _more(event: Event, times: int, last: datetime) -> Event:
    return structs.replace(event, count=event.count + times, last_timestamp=last)
