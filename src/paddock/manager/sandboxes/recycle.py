"""Returns a killed sandbox to its pool, if the pool recycles."""

from datetime import datetime

from paddock.cache.pool_members import pool_of
from paddock.cache.provider import Provider
from paddock.kit.errors import ConflictError, NotFoundError
from paddock.resources.kinds.pool import SandboxPool
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.transitions.recycling import Return, outcome


async def return_to_pool(provider: Provider, sandbox: Sandbox, *, now: datetime) -> Sandbox | None:
    """Return the sandbox to its pool; `None` if it must be deleted instead.

    `NotFoundError` if its claim has ended meanwhile: it may serve another one already.
    """
    key, claim = pool_of(sandbox), sandbox.spec.claim
    pool = provider.get(SandboxPool, key) if key is not None else None
    if claim is None or not isinstance(outcome(sandbox, pool, now=now), Return):
        return None

    def change(newest: Sandbox) -> Sandbox | None:
        if newest.spec.claim is None or newest.spec.claim.lock != claim.lock:
            raise NotFoundError(f"sandbox {claim.sandbox_id} does not exist")
        decision = outcome(newest, pool, now=now)
        return decision.sandbox if isinstance(decision, Return) else None

    try:
        uid = sandbox.metadata.uid
        written = await provider.write.mutate(Sandbox, sandbox.key, change, uid=uid)
    except ConflictError:
        # It changes too often: deleting is always correct, and costs only a warm sandbox.
        return None
    return written if written.spec.claim is None else None
