"""The built-in plugins: a quota per namespace (which is a team's), and what nodes can hold.

Both count what pools promise: each pool's size times what one of its sandboxes may use. They know
the exact answer, so they give it rather than have it searched for.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

from msgspec import Struct

from paddock.controllers.admission.plugin import (
    ADMITTED,
    AdmissionPlugin,
    PoolAdmission,
    PoolRequest,
)
from paddock.controllers.env.instance_types import footprint
from paddock.controllers.env.render import size_of
from paddock.resources.kinds.pool import SandboxPool
from paddock.resources.kinds.template import SandboxTemplateSpec

RETRY_SECONDS = 30.0


class Amounts(Struct, frozen=True, kw_only=True):
    """How much of each; `None` is without limit."""

    sandboxes: int | None = None
    cpu_millis: int | None = None
    memory_bytes: int | None = None

    @property
    def is_boundless(self) -> bool:
        """Say whether nothing is limited."""
        return self.sandboxes is None and self.cpu_millis is None and self.memory_bytes is None


class Pools(Protocol):
    """Where pools and what they are made of are found."""

    def pools(self, namespace: str | None) -> Iterable[SandboxPool]:
        """Give the pools of a namespace, or of all."""
        ...

    def template(self, pool: SandboxPool) -> SandboxTemplateSpec | None:
        """Give what a pool's sandboxes are made of."""
        ...


class QuotaPlugin(AdmissionPlugin):
    """Keeps the pools of each namespace within its team's quota."""

    name = "quota"

    def __init__(self, pools: Pools, limits: Callable[[str], Amounts]) -> None:
        self._pools = pools
        self._limits = limits

    def pre_create_pool(self, request: PoolRequest) -> PoolAdmission:
        """Judge a new pool."""
        return self._judge(request)

    def pre_update_pool(self, request: PoolRequest) -> PoolAdmission:
        """Judge a changed pool."""
        return self._judge(request)

    def _judge(self, request: PoolRequest) -> PoolAdmission:
        namespace = request.key.namespace
        limits = self._limits(namespace)
        others = self._pools.pools(namespace)
        return judge(self._pools, request, limits, others, f"the quota of {namespace}", "Quota")


class CapacityPlugin(AdmissionPlugin):
    """Keeps all pools together within what nodes can hold."""

    name = "capacity"

    def __init__(self, pools: Pools, capacity: Callable[[], Amounts]) -> None:
        self._pools = pools
        self._capacity = capacity

    def pre_create_pool(self, request: PoolRequest) -> PoolAdmission:
        """Judge a new pool."""
        return self._judge(request)

    def pre_update_pool(self, request: PoolRequest) -> PoolAdmission:
        """Judge a changed pool."""
        return self._judge(request)

    def _judge(self, request: PoolRequest) -> PoolAdmission:
        others = self._pools.pools(None)
        return judge(
            self._pools, request, self._capacity(), others, "what the nodes hold", "NodeCapacity"
        )


def judge(
    pools: Pools,
    request: PoolRequest,
    limits: Amounts,
    others: Iterable[SandboxPool],
    what: str,
    reason: str,
) -> PoolAdmission:
    """Say how many sandboxes of this pool fit beside what the other pools promise."""
    if limits.is_boundless:
        return ADMITTED
    used = [0, 0, 0]
    for pool in others:
        if pool.key != request.key and not pool.is_deleting:
            for index, amount in enumerate(_promise(pools.template(pool), _held(pool))):
                used[index] += amount
    each = _promise(pools.template(request.pool), 1)
    found = (limits.sandboxes, limits.cpu_millis, limits.memory_bytes)
    names = ("sandboxes", "thousandths of a core", "bytes of memory")
    best: tuple[int, str] | None = None
    for limit, taken, one, name in zip(found, used, each, names, strict=True):
        if limit is None or one == 0:
            continue
        room = max(limit - taken, 0) // one
        words = f"{what} is {limit} {name}, and other pools have {taken}"
        best = min(best, (room, words)) if best is not None else (room, words)
    if best is None or best[0] >= request.replicas:
        return ADMITTED
    return PoolAdmission(
        admitted=best[0],
        retry_after_seconds=RETRY_SECONDS,
        reason=reason + "Exceeded",
        message=f"{best[1]}: of {request.replicas} here {best[0]} fit",
    )


def _held(pool: SandboxPool) -> int:
    return max(size_of(pool), pool.status.allocated)


def _promise(template: SandboxTemplateSpec | None, count: int) -> tuple[int, int, int]:
    cpu, memory = footprint((template or SandboxTemplateSpec()).resources)
    return count, cpu * count, memory * count
