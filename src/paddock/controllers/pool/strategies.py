"""Strategies for evicted and outdated sandboxes of a pool: protocols, defaults, lookup. Pure.

A strategy is selected by name, with a field or a label of the pool. An unknown name is an error in
the pool's status. To add one, implement the protocol and add it to the table.
"""

from collections.abc import Mapping
from typing import Protocol, TypeVar

from msgspec import structs

from paddock.kit.errors import NotFoundError
from paddock.resources.kinds.pool import SandboxPool, SandboxPoolSpec
from paddock.resources.kinds.sandbox import LABEL_EVICT, Sandbox

LABEL_EVICTION_HANDLER = "paddock.dev/eviction-handler"
LABEL_UPDATE_STRATEGY = "paddock.dev/update-strategy"
T = TypeVar("T")


class EvictionHandler(Protocol):
    """Decides whether idle sandboxes with the label `paddock.dev/evict` are deleted.

    They are out of stock in any case. Claimed ones are left alone until they are released.
    """

    def should_delete(self, sandbox: Sandbox) -> bool:
        """Whether an evicted sandbox is deleted now."""
        ...


class DeleteEvicted:
    """Deletes evicted sandboxes at once; the pool creates others."""

    def should_delete(self, sandbox: Sandbox) -> bool:
        """Return True."""
        return True


class KeepEvicted:
    """Keeps evicted sandboxes for inspection; an operator deletes them."""

    def should_delete(self, sandbox: Sandbox) -> bool:
        """Return False."""
        return False


class PoolUpdate(Protocol):
    """Decides how a pool follows a changed template."""

    def applied(self, spec: SandboxPoolSpec) -> SandboxPoolSpec:
        """Return the spec to plan with."""
        ...


class Recreate:
    """Replaces idle sandboxes of an earlier revision, within `maxUnavailable`."""

    def applied(self, spec: SandboxPoolSpec) -> SandboxPoolSpec:
        """Return the spec unchanged."""
        return spec


class OnDelete:
    """Leaves idle sandboxes as they are; only new ones use the new template."""

    def applied(self, spec: SandboxPoolSpec) -> SandboxPoolSpec:
        """Return the spec with updates paused."""
        return structs.replace(
            spec, update_strategy=structs.replace(spec.update_strategy, paused=True)
        )


EVICTION_HANDLERS: Mapping[str, EvictionHandler] = {
    "default": DeleteEvicted(),
    "keep": KeepEvicted(),
}
UPDATE_STRATEGIES: Mapping[str, PoolUpdate] = {"recreate": Recreate(), "onDelete": OnDelete()}


def eviction_handler(pool: SandboxPool) -> EvictionHandler:
    """Return the handler that the pool's label or field names."""
    name = pool.metadata.labels.get(LABEL_EVICTION_HANDLER) or pool.spec.eviction_handler
    return _named(EVICTION_HANDLERS, name, "eviction handler")


def update_strategy(pool: SandboxPool) -> PoolUpdate:
    """Return the strategy that the pool's label names."""
    name = pool.metadata.labels.get(LABEL_UPDATE_STRATEGY, "recreate")
    return _named(UPDATE_STRATEGIES, name, "update strategy")


def _named(table: Mapping[str, T], name: str, what: str) -> T:
    if (found := table.get(name)) is None:
        known = ", ".join(sorted(table))
        raise NotFoundError(f"unknown {what} {name!r}: use one of {known}")
    return found


def should_delete(pool: SandboxPool, sandbox: Sandbox) -> bool:
    """Whether an unusable sandbox is deleted now."""
    is_evicted = LABEL_EVICT in sandbox.metadata.labels
    return not is_evicted or eviction_handler(pool).should_delete(sandbox)
