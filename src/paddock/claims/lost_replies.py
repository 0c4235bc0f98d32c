"""Writes whose reply was lost: found again by the lock of their claim, never repeated blindly."""

from collections.abc import Iterable

from paddock.cache.pool_members import PoolMembers
from paddock.cache.provider import Provider
from paddock.claims.quota.reservations import QuotaReservations
from paddock.kit.errors import DeadlineExceededError, NotFoundError, UnavailableError
from paddock.resources.kinds.sandbox import Sandbox

AMBIGUOUS_ERRORS = (UnavailableError, DeadlineExceededError, OSError)
"""After these a write may or may not have happened: read the store to find out."""


async def find_written(provider: Provider, wanted: Sandbox) -> Sandbox | None:
    """Return the sandbox as it is in the store, if it carries the lock of `wanted`."""
    try:
        found = await provider.live.get(Sandbox, wanted.key)
    except NotFoundError:
        return None
    lock = wanted.spec.claim.lock if wanted.spec.claim else ""
    if found.spec.claim is None or found.spec.claim.lock != lock:
        return None
    # As after any write of ours: the cache has it from now on, however late the watch is.
    provider.informer(Sandbox).observe(found)
    return found


class LostReplies:
    """Writes that may have happened although no reply came. Until it is known, each has quota."""

    def __init__(
        self, provider: Provider, reservations: QuotaReservations, pool_members: PoolMembers
    ) -> None:
        self._provider = provider
        self._reservations = reservations
        self._pool_members = pool_members
        self._unresolved: list[Sandbox] = []

    def add(self, writes: Iterable[Sandbox]) -> None:
        """Look these writes up later."""
        self._unresolved.extend(writes)

    async def resolve(self) -> None:
        """Look up all writes; release the quota of those that did not happen."""
        while self._unresolved:
            wanted = self._unresolved[-1]
            found = await find_written(self._provider, wanted)
            if self._unresolved and self._unresolved[-1] is wanted:
                self._unresolved.pop()
                if found is None and wanted.spec.claim is not None:
                    self._reservations.release(wanted.spec.claim.lock)
                    # A warm sandbox that was not claimed after all is available again.
                    self._pool_members.unreserve(wanted.key)
