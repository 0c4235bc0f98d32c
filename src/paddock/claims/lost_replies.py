"""Writes whose reply was lost: found again by the lock of their claim, never repeated blindly."""

from paddock.cache.provider import Provider
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
