"""Claim a warm sandbox of a pool, exactly once.

Two locks: `PoolMembers` reserves each sandbox for one caller of this process, the store's
compare-and-swap gives it to one caller of all processes.
"""

import logging
from collections.abc import Callable

from paddock.cache.pool_members import PoolMembers
from paddock.cache.provider import Provider
from paddock.claims.lost_replies import AMBIGUOUS_ERRORS, find_written
from paddock.kit.errors import ConflictError, NotFoundError, PaddockError
from paddock.kit.logs import fields
from paddock.resources.kinds.pool import SandboxPool
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.meta import Key

log = logging.getLogger(__name__)

MAX_LOST_REPLIES = 3
"""After so many writes without a reply the store counts as unavailable."""


async def take(
    pool_members: PoolMembers,
    provider: Provider,
    pool: Key,
    change: Callable[[Sandbox], Sandbox],
    *,
    unresolved: list[Sandbox] | None = None,
) -> Sandbox | None:
    """Write a claim to a warm sandbox of the pool and return it; `None` if none is left.

    Sandboxes of the pool's current revision are taken first. On a conflict another claim was
    first, and the next candidate is tried. If the reply to a write is lost, the store is read. If
    this function raises, writes that may have happened are left in `unresolved`.
    """
    unresolved = unresolved if unresolved is not None else []
    to_return: list[Key] = []
    found = provider.informer(SandboxPool).get(pool)
    revision = found.status.revision if found is not None else None
    try:
        return await _take(pool_members, provider, pool, change, revision, unresolved, to_return)
    finally:
        # Only at the end: the same sandbox must not be tried again while the store is away.
        for key in to_return:
            pool_members.unreserve(key)


async def _take(
    pool_members: PoolMembers,
    provider: Provider,
    pool: Key,
    change: Callable[[Sandbox], Sandbox],
    revision: str | None,
    unresolved: list[Sandbox],
    to_return: list[Key],
) -> Sandbox | None:
    while (candidate := pool_members.reserve(pool, revision)) is not None:
        wanted = change(candidate)
        unresolved.append(wanted)
        try:
            taken = await provider.write.update(wanted)
        except (ConflictError, NotFoundError) as error:
            taken = None
            log.debug(
                "sandbox was claimed by another writer",
                extra=fields(sandbox=candidate.key, error=error.message),
            )
        except AMBIGUOUS_ERRORS:
            taken = await find_written(provider, wanted)
            if taken is None:
                to_return.append(candidate.key)
                if len(to_return) >= MAX_LOST_REPLIES:
                    unresolved.pop()
                    raise
        except PaddockError:
            # Rejected, so certainly not written: the sandbox stays warm for the next claim.
            unresolved.pop()
            to_return.append(candidate.key)
            raise
        unresolved.pop()
        if taken is not None:
            return taken
    return None
