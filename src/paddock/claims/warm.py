"""Reserve warm sandboxes of a pool, and claim one of them exactly once.

API requests and SandboxClaims use `take`. A batch reserves several with `reserve` and records them
in its own status (`controllers/batch/allocation/allocator.py`).

Two locks: `PoolMembers` reserves each sandbox for one caller of this process, the store's
compare-and-swap gives it to one caller of all processes.
"""

import logging
from collections.abc import Callable, Iterable, Iterator

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


def reserve(pool_members: PoolMembers, provider: Provider, pool: Key) -> Iterator[Sandbox]:
    """Reserve the pool's warm sandboxes one by one, those of its current revision first.

    Each one is reserved when it is yielded, and stays so until its next event or `unreserve`.
    """
    found = provider.informer(SandboxPool).get(pool)
    revision = (found.status.revision or None) if found is not None else None
    while (candidate := pool_members.reserve(pool, revision)) is not None:
        yield candidate


def unreserve(pool_members: PoolMembers, sandboxes: Iterable[Sandbox]) -> None:
    """Make reserved sandboxes that were not claimed available again."""
    for sandbox in sandboxes:
        pool_members.unreserve(sandbox.key)


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
    to_return: list[Sandbox] = []
    candidates = reserve(pool_members, provider, pool)
    try:
        return await _take(candidates, provider, change, unresolved, to_return)
    finally:
        # Only at the end: the same sandbox must not be tried again while the store is away.
        unreserve(pool_members, to_return)


async def _take(
    candidates: Iterator[Sandbox],
    provider: Provider,
    change: Callable[[Sandbox], Sandbox],
    unresolved: list[Sandbox],
    to_return: list[Sandbox],
) -> Sandbox | None:
    for candidate in candidates:
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
                to_return.append(candidate)
                if len(to_return) >= MAX_LOST_REPLIES:
                    unresolved.pop()
                    raise
        except PaddockError:
            # Rejected, so certainly not written: the sandbox stays warm for the next claim.
            unresolved.pop()
            to_return.append(candidate)
            raise
        unresolved.pop()
        if taken is not None:
            return taken
    return None
