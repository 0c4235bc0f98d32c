"""Idempotency keys where several processes serve: one process creates the sandbox of a key.

The process that creates the record of a key creates the sandbox; the others wait until they see it.
The record is a Lease named by a hash of team and key. It is needed until the claim is written:
from then on the sandbox itself carries the key. The record is deleted if its claim failed or its
sandbox ends, so that the key can be used again; it is taken over after its time if its process
died; old records are swept.
"""

import asyncio
import hashlib
import logging
from datetime import timedelta

import msgspec
from msgspec import Struct, structs

from paddock.cache import indexes
from paddock.cache.provider import Provider
from paddock.claims.caller import LABEL_KIND, SYSTEM_NAMESPACE
from paddock.claims.requests import NewSandbox
from paddock.kit.clock import Clock
from paddock.kit.errors import (
    AlreadyExistsError,
    ConflictError,
    NotFoundError,
    PaddockError,
    UnavailableError,
)
from paddock.kit.logs import fields
from paddock.resources.kinds.builtin import Lease, LeaseSpec
from paddock.resources.kinds.sandbox import ClaimIdentity, Sandbox
from paddock.resources.meta import Key, ObjectMeta
from paddock.resources.selectors import parse_fields, parse_labels
from paddock.store.port import Store

log = logging.getLogger(__name__)

KIND_IDEMPOTENCY_KEY = "idempotency-key"
MARGIN_SECONDS = 60.0
"""A record holds for this long after the claim's timeout: clocks differ, writes are slow."""
KEEP_SECONDS = 600.0
"""A record is kept for this long after that."""
SWEEP_SECONDS = 120.0
READ_SECONDS = 0.05
READS = 6


class KeyLease(Struct, frozen=True):
    """The right to create the sandbox of a key."""

    record: Lease
    until: float
    """Nothing may be written after this, by our own monotonic clock."""


class IdempotencyKeys:
    """Grants each idempotency key to one claim of all processes."""

    def __init__(
        self,
        store: Store,
        provider: Provider,
        clock: Clock,
        account: str,
        namespace: str = SYSTEM_NAMESPACE,
    ) -> None:
        self._store = store
        self._namespace = namespace
        self._provider = provider
        self._clock = clock
        self._account = account
        self._forgetting: set[asyncio.Task[None]] = set()
        provider.informer(Sandbox).subscribe(self._observe)

    async def acquire(
        self, team: str, key: str, fingerprint: str, *, seconds: float
    ) -> KeyLease | Sandbox:
        """Return the right to create the sandbox, or the sandbox that another process created.

        `ConflictError` if the key was used for another request; `UnavailableError` if another
        process has not created it in time.
        """
        until = self._clock.monotonic() + seconds
        while True:
            found = self._known(team, key)
            if found is not None:
                return found
            wanted = self._record(team, key, fingerprint, seconds)
            started = self._clock.monotonic()
            try:
                return KeyLease(await self._store.create(wanted), started + seconds)
            except AlreadyExistsError:
                taken = await self._take_over(wanted, team, key, started + seconds)
            if taken is not None:
                return taken
            if self._clock.monotonic() >= until:
                raise UnavailableError(
                    "another request with this idempotency key is in flight",
                    hint="send it again; it will find the same sandbox",
                    retry_after_seconds=1,
                )
            await self._wait_until_seen(team, key)

    async def release(self, lease: KeyLease) -> None:
        """Remove the record, so that others can use the key: nothing was or will be created."""
        await self._remove(lease.record)

    def _observe(self, old: Sandbox | None, new: Sandbox | None) -> None:
        """Remove the record of a key when the sandbox that this process created for it ends."""
        claim = old.spec.claim if old is not None else None
        if claim is None or claim.account != self._account or not claim.idempotency_key:
            return
        begins = new is not None and new.is_deleting and old is not None and not old.is_deleting
        if begins or new is None:
            task = asyncio.get_running_loop().create_task(self._forget(claim), name="forget key")
            self._forgetting.add(task)
            task.add_done_callback(self._forgetting.discard)

    async def _forget(self, claim: ClaimIdentity) -> None:
        try:
            record = await self._store.get(Lease, self._name(claim.owner, claim.idempotency_key))
            taken = record.spec.acquire_time
            if taken is not None and taken <= claim.claim_time:
                await self._remove(record)
        except NotFoundError:
            return
        except (PaddockError, OSError) as error:
            log.info("idempotency key was not removed", extra=fields(error=repr(error)))

    async def _take_over(
        self, wanted: Lease, team: str, key: str, until: float
    ) -> KeyLease | Sandbox | None:
        """Read the record of the key; take it over if it has expired."""
        try:
            record = await self._store.get(Lease, wanted.key)
        except NotFoundError:
            return None
        if not self._is_expired(record):
            if record.spec.holder_identity != wanted.spec.holder_identity:
                raise ConflictError("the same idempotency key was used for another request")
            return None
        owned = parse_fields(f"spec.claim.owner={team},spec.claim.idempotencyKey={key}")
        page = await self._store.list(Sandbox, fields=owned)
        if page.items:
            # Created earlier, and not in our cache yet.
            self._provider.informer(Sandbox).observe(page.items[0])
            return page.items[0]
        try:
            written = await self._store.update(structs.replace(record, spec=wanted.spec))
        except (ConflictError, NotFoundError):
            return None
        return KeyLease(written, until)

    def _known(self, team: str, key: str) -> Sandbox | None:
        found = self._provider.by_index(Sandbox, indexes.IDEMPOTENCY_KEY, (team, key))
        return found[0] if found else None

    async def _wait_until_seen(self, team: str, key: str) -> None:
        """Wait until the cache has the sandbox of a key, or the record is to be read again."""
        for _ in range(READS):
            await asyncio.sleep(READ_SECONDS)
            if self._known(team, key) is not None:
                return

    def _record(self, team: str, key: str, fingerprint: str, seconds: float) -> Lease:
        name = self._name(team, key)
        return Lease(
            metadata=ObjectMeta(
                name=name.name, namespace=name.namespace, labels={LABEL_KIND: KIND_IDEMPOTENCY_KEY}
            ),
            spec=LeaseSpec(
                holder_identity=fingerprint,
                lease_duration_seconds=int(seconds + MARGIN_SECONDS) + 1,
                acquire_time=self._clock.now(),
            ),
        )

    def _is_expired(self, record: Lease, *, kept_seconds: float = 0.0) -> bool:
        taken, seconds = record.spec.acquire_time, record.spec.lease_duration_seconds
        if taken is None or seconds is None:
            return True
        return self._clock.now() >= taken + timedelta(seconds=seconds + kept_seconds)

    # ---- sweeping ------------------------------------------------------------------------

    async def keep_swept(self) -> None:
        """Remove old records every `SWEEP_SECONDS`, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            try:
                await self.sweep()
            except PaddockError as error:
                log.warning("idempotency keys were not swept", extra=fields(error=error.message))

    async def sweep(self) -> int:
        """Remove old records and return their number."""
        labels = parse_labels(f"{LABEL_KIND}={KIND_IDEMPOTENCY_KEY}")
        page = await self._store.list(Lease, namespace=self._namespace, labels=labels)
        old = [item for item in page.items if self._is_expired(item, kept_seconds=KEEP_SECONDS)]
        for record in old:
            await self._remove(record)
        return len(old)

    async def _remove(self, record: Lease) -> None:
        version = record.metadata.resource_version
        try:
            await self._store.delete(Lease, record.key, resource_version=version)
        except (NotFoundError, ConflictError):
            # Another process has removed it or taken it over.
            return

    def _name(self, team: str, key: str) -> Key:
        digest = hashlib.sha256(f"{team}\0{key}".encode()).hexdigest()[:40]
        return Key(self._namespace, f"first-{digest}")


def request_hash(request: NewSandbox) -> str:
    """Return a hash that differs for different requests with the same idempotency key."""
    return hashlib.sha256(msgspec.json.encode(request, order="deterministic")).hexdigest()[:32]
