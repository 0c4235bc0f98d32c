"""Selects the pool that serves a batch: by name, or the best fit for `*`.

What batches wait for at a pool counts as used, from the moment of their choice: two batches of the
same instant do not choose the same pool while another can hold one of them.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from msgspec import structs

from paddock.cache.pool_members import PoolMembers
from paddock.cache.provider import Provider
from paddock.controllers.batch.allocation.plan import BatchDemand
from paddock.controllers.batch.allocation.pool_scoring import (
    NoPoolFits,
    PoolCandidate,
    Profile,
    choose,
)
from paddock.controllers.batch.shards import missing_shards
from paddock.controllers.batch.status import CONDITION_ASSIGNED, with_condition
from paddock.kit.clock import Clock
from paddock.resources.kinds.batch import BatchSandbox
from paddock.resources.kinds.pool import SandboxPool
from paddock.resources.kinds.template import SandboxTemplateSpec
from paddock.resources.meta import ConditionStatus, Key, condition

SHARED_NAMESPACE = "default"
"""Pools of this namespace serve every namespace."""
ANY = "*"
Promised = Callable[[Key], int]
"""Returns how many sandboxes of a pool are promised to other batches."""


class PoolSelector:
    """Selects pools for batches."""

    def __init__(
        self,
        provider: Provider,
        pool_members: PoolMembers,
        clock: Clock,
        profiles: Mapping[str, Profile],
        *,
        of_environment: Callable[[Key, int, int, Promised], Key | None],
        waiting: Callable[[Key], Iterable[BatchDemand]],
    ) -> None:
        """`of_environment(key, replicas, at_once, promised)` selects an environment's pool, if any.

        `waiting` returns the demand for a pool, by batch.
        """
        self._provider = provider
        self._pool_members = pool_members
        self._clock = clock
        self._profiles = profiles
        self._of_environment = of_environment
        self._waiting = waiting
        self._chosen: dict[Key, tuple[Key, int]] = {}
        """The pool of each batch whose status does not show it yet, and its missing shards."""

    def select(self, batch: BatchSandbox) -> tuple[BatchSandbox, bool]:
        """Return the batch with its pool, and whether it has one (or needs none)."""
        if not batch.spec.pool_ref:
            return batch, True
        self._chosen.pop(batch.key, None)
        if batch.status.pool and (self.pool_of(batch) is not None or not missing_shards(batch)):
            return self._clear_error(batch), True
        if batch.spec.pool_ref != ANY:
            return self._by_name(batch)
        decision = choose(batch, self._candidates(batch), self._profiles)
        if isinstance(decision, NoPoolFits):
            return self._with_condition(
                batch, holds=False, reason="NoPoolFits", text=decision.why
            ), False
        batch = self._with_pool(batch, decision)
        text = f"pool {decision} was chosen"
        return self._with_condition(batch, holds=True, reason="PoolChosen", text=text), True

    def _by_name(self, batch: BatchSandbox) -> tuple[BatchSandbox, bool]:
        name, wanted = batch.spec.pool_ref, batch.spec.replicas
        at_once = batch.spec.min_available or 0
        for namespace in (batch.metadata.namespace, SHARED_NAMESPACE):
            key = Key(namespace, name)
            promised = partial(self._promised, batch.key)
            key = self._of_environment(key, wanted, at_once, promised) or key
            pool = self._provider.get(SandboxPool, key)
            if pool is None or pool.is_deleting:
                continue
            return self._clear_error(self._with_pool(batch, pool.key)), True
        places = " or ".join(dict.fromkeys((batch.metadata.namespace, SHARED_NAMESPACE)))
        text = f"no pool or environment {name!r} exists in {places}"
        return self._with_condition(batch, holds=False, reason="PoolNotFound", text=text), False

    def _with_pool(self, batch: BatchSandbox, pool: Key) -> BatchSandbox:
        self._chosen[batch.key] = (pool, len(missing_shards(batch)))
        status = structs.replace(batch.status, pool=_reference(batch, pool))
        return structs.replace(batch, status=status)

    def _promised(self, batch: Key, pool: Key) -> int:
        """Return how many sandboxes of a pool other batches wait for."""
        missing = {item.key: item.missing for item in self._waiting(pool)}
        missing |= {key: count for key, (chosen, count) in self._chosen.items() if chosen == pool}
        missing.pop(batch, None)
        return sum(missing.values())

    def forget(self, batch: Key) -> None:
        """Forget a batch that is gone."""
        self._chosen.pop(batch, None)

    def pool_of(self, batch: BatchSandbox) -> SandboxPool | None:
        """Return the pool that serves a batch; `None` if it does not exist (any more)."""
        namespace, _, name = batch.status.pool.rpartition("/")
        pool = self._provider.get(SandboxPool, Key(namespace or batch.metadata.namespace, name))
        return None if pool is None or pool.is_deleting else pool

    def _clear_error(self, batch: BatchSandbox) -> BatchSandbox:
        """Clear the condition that reports a missing pool."""
        shown = condition(batch.status.conditions, CONDITION_ASSIGNED)
        if shown is None or shown.status is ConditionStatus.TRUE:
            return batch
        return self._with_condition(batch, holds=True, reason="PoolFound", text="")

    def _with_condition(
        self, batch: BatchSandbox, *, holds: bool, reason: str, text: str
    ) -> BatchSandbox:
        conditions = with_condition(
            batch, batch.status.conditions, CONDITION_ASSIGNED, holds=holds, reason=reason,
            text=text, clock=self._clock,
        )  # fmt: skip
        status = structs.replace(batch.status, conditions=conditions, message="" if holds else text)
        return structs.replace(batch, status=status)

    def _candidates(self, batch: BatchSandbox) -> tuple[PoolCandidate, ...]:
        namespaces = dict.fromkeys((batch.metadata.namespace, SHARED_NAMESPACE))
        found: list[PoolCandidate] = []
        for namespace in namespaces:
            for pool in self._provider.pools(namespace=namespace):
                template = self._template(pool)
                if template is None or pool.is_deleting:
                    continue
                members = self._pool_members.members(pool.key)
                allocated = len(members.allocated) + self._promised(batch.key, pool.key)
                idle = len(members.available) + len(members.reserved)
                idle += len(members.creating) + len(members.recycling)
                found.append(
                    PoolCandidate(
                        pool=pool, template=template, allocated=allocated, total=allocated + idle
                    )
                )
        return tuple(found)

    def _template(self, pool: SandboxPool) -> SandboxTemplateSpec | None:
        if pool.spec.template is not None or pool.spec.template_ref is None:
            return pool.spec.template
        reference = pool.spec.template_ref
        home = reference.namespace or pool.metadata.namespace
        template = self._provider.template(reference.name, namespace=home)
        return None if template is None else template.spec


def _reference(batch: BatchSandbox, pool: Key) -> str:
    return pool.name if pool.namespace == batch.metadata.namespace else str(pool)
