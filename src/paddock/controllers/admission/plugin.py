"""The interface of admission plugins.

A plugin is called before a pool is created, changed or deleted. It may be called repeatedly with
sizes that are never applied (the largest admissible one is searched for), so hooks must have no
side effects. They may be coroutines or plain functions; the latter run in their own thread.

Third-party plugins are found by the entry point group `paddock.admission`: each names a callable
that takes an `AdmissionContext` and returns a plugin.
"""

from collections.abc import Awaitable

from msgspec import Struct

from paddock.cache.provider import Provider
from paddock.kit.clock import Clock
from paddock.resources.kinds.pool import SandboxPool
from paddock.resources.meta import Key
from paddock.settings import Settings

GROUP = "paddock.admission"


class PoolRequest(Struct, frozen=True, kw_only=True):
    """A change of a pool that needs admission."""

    pool: SandboxPool
    """The pool after the change."""
    current: SandboxPool | None = None
    """The pool before the change; `None` if it is created."""
    replicas: int = 0
    """Its size after the change: running and idle sandboxes."""

    @property
    def key(self) -> Key:
        """Key of the pool."""
        return self.pool.key


class PoolAdmission(Struct, frozen=True, kw_only=True):
    """A plugin's result."""

    admitted: int | None = None
    """The largest admitted size; `None` sets no limit. Less than requested refuses the rest."""
    retry_after_seconds: float | None = None
    """When a retry may succeed."""
    reason: str = ""
    """Machine-readable, in CamelCase."""
    message: str = ""
    """Human-readable."""

    def allows(self, replicas: int) -> bool:
        """Whether this size is admitted."""
        return self.admitted is None or self.admitted >= replicas


ADMITTED = PoolAdmission()


class AdmissionContext(Struct, frozen=True):
    """What a plugin may read."""

    settings: Settings
    provider: Provider
    clock: Clock


class AdmissionPlugin:
    """Base class of plugins; admits everything. Override the hooks to limit."""

    name: str = "plugin"

    def pre_create_pool(self, request: PoolRequest) -> PoolAdmission | Awaitable[PoolAdmission]:
        """Called before a pool is created."""
        return ADMITTED

    def pre_update_pool(self, request: PoolRequest) -> PoolAdmission | Awaitable[PoolAdmission]:
        """Called before a pool's size or spec changes."""
        return ADMITTED

    def pre_delete_pool(self, request: PoolRequest) -> PoolAdmission | Awaitable[PoolAdmission]:
        """Called before a pool is deleted; admitting less than its size keeps it."""
        return ADMITTED


def merged(results: list[PoolAdmission]) -> PoolAdmission:
    """Merge results: the smallest size with its reason, the longest wait."""
    limits = [item for item in results if item.admitted is not None]
    if not limits:
        return ADMITTED
    strictest = min(limits, key=lambda item: item.admitted or 0)
    waits = [item.retry_after_seconds for item in limits if item.retry_after_seconds is not None]
    return PoolAdmission(
        admitted=strictest.admitted,
        retry_after_seconds=max(waits, default=None),
        reason=strictest.reason,
        message=strictest.message,
    )
