"""Built-in plugins: quota per namespace (team), and capacity of the nodes.

Both count the promised resources: each pool's size times the footprint of one sandbox. They know
the exact limit and return it, so no search is needed.
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
    """Amounts of resources; `None` means unlimited."""

    sandboxes: int | None = None
    cpu_millis: int | None = None
    memory_bytes: int | None = None

    @property
    def is_unlimited(self) -> bool:
        """Whether nothing is limited."""
        return self.sandboxes is None and self.cpu_millis is None and self.memory_bytes is None


class Pools(Protocol):
    """Source of pools and their templates."""

    def pools(self, namespace: str | None) -> Iterable[SandboxPool]:
        """Return the pools of a namespace, or all."""
        ...

    def template(self, pool: SandboxPool) -> SandboxTemplateSpec | None:
        """Return the template of a pool's sandboxes."""
        ...


class QuotaPlugin(AdmissionPlugin):
    """Limits the pools of each namespace to its team's quota."""

    name = "quota"

    def __init__(self, pools: Pools, limits: Callable[[str], Amounts]) -> None:
        self._pools = pools
        self._limits = limits

    def pre_create_pool(self, request: PoolRequest) -> PoolAdmission:
        """Limit a new pool."""
        return self._admit(request)

    def pre_update_pool(self, request: PoolRequest) -> PoolAdmission:
        """Limit a changed pool."""
        return self._admit(request)

    def _admit(self, request: PoolRequest) -> PoolAdmission:
        namespace = request.key.namespace
        limits = self._limits(namespace)
        others = self._pools.pools(namespace)
        return admit(self._pools, request, limits, others, f"the quota of {namespace}", "Quota")


class CapacityPlugin(AdmissionPlugin):
    """Limits all pools together to the capacity of the nodes."""

    name = "capacity"

    def __init__(self, pools: Pools, capacity: Callable[[], Amounts]) -> None:
        self._pools = pools
        self._capacity = capacity

    def pre_create_pool(self, request: PoolRequest) -> PoolAdmission:
        """Limit a new pool."""
        return self._admit(request)

    def pre_update_pool(self, request: PoolRequest) -> PoolAdmission:
        """Limit a changed pool."""
        return self._admit(request)

    def _admit(self, request: PoolRequest) -> PoolAdmission:
        others = self._pools.pools(None)
        return admit(
            self._pools,
            request,
            self._capacity(),
            others,
            "the capacity of the nodes",
            "NodeCapacity",
        )


def admit(
    pools: Pools,
    request: PoolRequest,
    limits: Amounts,
    others: Iterable[SandboxPool],
    what: str,
    reason: str,
) -> PoolAdmission:
    """Return how many sandboxes of this pool fit beside the other pools."""
    if limits.is_unlimited:
        return ADMITTED
    used = [0, 0, 0]
    for pool in others:
        if pool.key != request.key and not pool.is_deleting:
            for index, amount in enumerate(_total(pools.template(pool), _size(pool))):
                used[index] += amount
    each = _total(pools.template(request.pool), 1)
    found = (limits.sandboxes, limits.cpu_millis, limits.memory_bytes)
    names = ("sandboxes", "millicores", "bytes of memory")
    best: tuple[int, str] | None = None
    for limit, taken, one, name in zip(found, used, each, names, strict=True):
        if limit is None or one == 0:
            continue
        room = max(limit - taken, 0) // one
        message = f"{what} is {limit} {name}, and other pools use {taken}"
        best = min(best, (room, message)) if best is not None else (room, message)
    if best is None or best[0] >= request.replicas:
        return ADMITTED
    return PoolAdmission(
        admitted=best[0],
        retry_after_seconds=RETRY_SECONDS,
        reason=reason + "Exceeded",
        message=f"{best[1]}: {best[0]} of {request.replicas} fit",
    )


def _size(pool: SandboxPool) -> int:
    return max(size_of(pool), pool.status.allocated)


def _total(template: SandboxTemplateSpec | None, count: int) -> tuple[int, int, int]:
    cpu, memory = footprint((template or SandboxTemplateSpec()).resources)
    return count, cpu * count, memory * count
