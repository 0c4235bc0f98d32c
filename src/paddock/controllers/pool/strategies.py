"""What a pool does with evicted and with outdated sandboxes: interfaces, choices, defaults. Pure.

Each is chosen by name, by a field of the pool or by a label on it; a name that nobody knows is an
error that the pool's status shows. To add one: implement the protocol, enter it in the table.
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
    """Decides what becomes of idle sandboxes that bear the label `paddock.dev/evict`.

    They are out of stock in any case, and those in somebody's hands are left alone until they
    are given back.
    """

    def ends(self, sandbox: Sandbox) -> bool:
        """Say whether an evicted sandbox is deleted now."""
        ...


class DeleteEvicted:
    """Deletes them at once; the pool makes others."""

    def ends(self, sandbox: Sandbox) -> bool:
        """Say yes."""
        return True


class KeepEvicted:
    """Keeps them out of stock, for somebody to look at; deleting them is up to that somebody."""

    def ends(self, sandbox: Sandbox) -> bool:
        """Say no."""
        return False


class PoolUpdate(Protocol):
    """Decides how a pool follows a changed template."""

    def applied(self, spec: SandboxPoolSpec) -> SandboxPoolSpec:
        """Give the spec by which the pool is planned."""
        ...


class Recreate:
    """Replaces idle sandboxes of an earlier revision, within `maxUnavailable`."""

    def applied(self, spec: SandboxPoolSpec) -> SandboxPoolSpec:
        """Plan as the spec says."""
        return spec


class OnDelete:
    """Leaves idle sandboxes as they are: new ones follow the template, old ones are used up."""

    def applied(self, spec: SandboxPoolSpec) -> SandboxPoolSpec:
        """Plan without replacing anything."""
        return structs.replace(
            spec, update_strategy=structs.replace(spec.update_strategy, paused=True)
        )


EVICTION_HANDLERS: Mapping[str, EvictionHandler] = {
    "default": DeleteEvicted(),
    "keep": KeepEvicted(),
}
UPDATE_STRATEGIES: Mapping[str, PoolUpdate] = {"recreate": Recreate(), "onDelete": OnDelete()}


def eviction_handler(pool: SandboxPool) -> EvictionHandler:
    """Find the handler that a pool's label or field names."""
    name = pool.metadata.labels.get(LABEL_EVICTION_HANDLER) or pool.spec.eviction_handler
    return _named(EVICTION_HANDLERS, name, "eviction handler")


def update_strategy(pool: SandboxPool) -> PoolUpdate:
    """Find the strategy that a pool's label names."""
    name = pool.metadata.labels.get(LABEL_UPDATE_STRATEGY, "recreate")
    return _named(UPDATE_STRATEGIES, name, "update strategy")


def _named(table: Mapping[str, T], name: str, what: str) -> T:
    if (found := table.get(name)) is None:
        known = ", ".join(sorted(table))
        raise NotFoundError(f"there is no {what} {name!r}: use one of {known}")
    return found


def ends(pool: SandboxPool, sandbox: Sandbox) -> bool:
    """Say whether a sandbox that is on its way out is deleted now."""
    is_evicted = LABEL_EVICT in sandbox.metadata.labels
    return not is_evicted or eviction_handler(pool).ends(sandbox)
