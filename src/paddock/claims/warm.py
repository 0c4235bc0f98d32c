"""Taking a warm sandbox out of a pool, exactly once.

Two locks: `PoolMembers` reserves each sandbox for one caller of this process, the store's
compare-and-swap to one caller of all.
"""

import logging
from collections.abc import Callable

from paddock.cache.pool_members import PoolMembers
from paddock.cache.provider import Provider
from paddock.kit.errors import (
    ConflictError,
    DeadlineExceededError,
    NotFoundError,
    PaddockError,
    UnavailableError,
)
from paddock.kit.logs import fields
from paddock.resources.kinds.pool import SandboxPool
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.meta import Key

log = logging.getLogger(__name__)

AMBIGUOUS = (UnavailableError, DeadlineExceededError, OSError)
"""After these nobody knows whether a write happened; only a look at the store tells."""


PATIENCE = 3
"""So many writes without an answer are enough: the store is away."""


async def take(
    pool_members: PoolMembers,
    provider: Provider,
    pool: Key,
    change: Callable[[Sandbox], Sandbox],
    *,
    unclear: list[Sandbox] | None = None,
) -> Sandbox | None:
    """Write a claim to a warm sandbox of the pool and give it; `None` when stock is out.

    Those of the pool's current revision go first.

    A conflict means that somebody else was first; the next candidate is tried. When the reply to
    the write is lost, the store is asked whether the claim's lock is there. If this raises, what
    it may have written without learning of it is left in `unclear`.
    """
    unclear = unclear if unclear is not None else []
    unanswered: list[Key] = []
    found = provider.informer(SandboxPool).get(pool)
    revision = found.status.revision if found is not None else None
    try:
        return await _take(pool_members, provider, pool, change, revision, unclear, unanswered)
    finally:
        # Only now: the same one must not be tried again and again while the store is away.
        for key in unanswered:
            pool_members.unreserve(key)


async def _take(
    pool_members: PoolMembers,
    provider: Provider,
    pool: Key,
    change: Callable[[Sandbox], Sandbox],
    revision: str | None,
    unclear: list[Sandbox],
    unanswered: list[Key],
) -> Sandbox | None:
    while (candidate := pool_members.reserve(pool, revision)) is not None:
        wanted = change(candidate)
        unclear.append(wanted)
        try:
            taken = await provider.write.update(wanted)
        except (ConflictError, NotFoundError) as error:
            taken = None
            log.debug(
                "somebody else took the sandbox",
                extra=fields(sandbox=candidate.key, error=error.message),
            )
        except AMBIGUOUS:
            taken = await written(provider, wanted)
            if taken is None:
                unanswered.append(candidate.key)
                if len(unanswered) >= PATIENCE:
                    unclear.pop()
                    raise
        except PaddockError:
            # Refused, so certainly not written: it is as good for the next claim.
            unclear.pop()
            unanswered.append(candidate.key)
            raise
        unclear.pop()
        if taken is not None:
            return taken
    return None


async def written(provider: Provider, wanted: Sandbox) -> Sandbox | None:
    """Say whether a write whose reply was lost is in the store, by the lock it carries."""
    try:
        found = await provider.live.get(Sandbox, wanted.key)
    except NotFoundError:
        return None
    lock = wanted.spec.claim.lock if wanted.spec.claim else ""
    if found.spec.claim is None or found.spec.claim.lock != lock:
        return None
    # As after any write of ours: whoever is told of it finds it here, however late the watch is.
    provider.informer(Sandbox).observe(found)
    return found
