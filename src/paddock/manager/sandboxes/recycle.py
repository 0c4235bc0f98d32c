"""Returns a killed sandbox to its pool, if the pool recycles."""

from datetime import datetime

from paddock.cache.pool_members import pool_of
from paddock.cache.provider import Provider
from paddock.kit.errors import ConflictError
from paddock.resources.kinds.pool import SandboxPool
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.transitions.recycling import Return, outcome


async def return_to_pool(provider: Provider, sandbox: Sandbox, *, now: datetime) -> Sandbox | None:
    """Return the sandbox to its pool; `None` if it must be deleted instead."""
    key = pool_of(sandbox)
    pool = provider.get(SandboxPool, key) if key is not None else None
    decision = outcome(sandbox, pool, now=now)
    if not isinstance(decision, Return):
        return None
    try:
        return await provider.write.update(decision.sandbox)
    except ConflictError:
        # Changed since it was read: deleting is always correct, and costs only a warm sandbox.
        return None
