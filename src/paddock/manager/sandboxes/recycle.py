"""Giving a killed sandbox back to its pool, where the pool recycles."""

from datetime import datetime

from paddock.cache.pool_members import pool_of
from paddock.cache.provider import Provider
from paddock.kit.errors import ConflictError
from paddock.resources.kinds.pool import SandboxPool
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.transitions.recycling import Return, outcome


async def give_back(provider: Provider, sandbox: Sandbox, *, now: datetime) -> Sandbox | None:
    """Let its pool have a sandbox again; `None` where it must be deleted instead."""
    key = pool_of(sandbox)
    pool = provider.get(SandboxPool, key) if key is not None else None
    decision = outcome(sandbox, pool, now=now)
    if not isinstance(decision, Return):
        return None
    try:
        return await provider.write.update(decision.sandbox)
    except ConflictError:
        # Changed since it was read: deleting is always right, and loses only warmth.
        return None
