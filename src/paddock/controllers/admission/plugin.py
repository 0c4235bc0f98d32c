"""What an admission plugin is asked and answers.

A plugin is asked before a pool is made, changed or deleted. It may be asked again and again about
sizes that never come about (the largest admissible one is searched for), so hooks have no side
effects. They may be coroutines or plain functions; the latter run in a thread of their own.

Others' plugins are found by the entry point group `paddock.admission`: each names a callable that
takes an `AdmissionContext` and gives a plugin.
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
    """What is about to happen to a pool."""

    pool: SandboxPool
    """As it would be."""
    current: SandboxPool | None = None
    """As it is; absent where it is about to be made."""
    replicas: int = 0
    """Its size then: running and idle sandboxes together."""

    @property
    def key(self) -> Key:
        """Where the pool is."""
        return self.pool.key


class PoolAdmission(Struct, frozen=True, kw_only=True):
    """A plugin's answer."""

    admitted: int | None = None
    """The largest size that may be; `None` sets no limit. Less than asked for refuses the rest."""
    retry_after_seconds: float | None = None
    """When asking again may help."""
    reason: str = ""
    """One word."""
    message: str = ""
    """One sentence for people."""

    def allows(self, replicas: int) -> bool:
        """Say whether so many may be."""
        return self.admitted is None or self.admitted >= replicas


ADMITTED = PoolAdmission()


class AdmissionContext(Struct, frozen=True):
    """What a plugin may look at."""

    settings: Settings
    provider: Provider
    clock: Clock


class AdmissionPlugin:
    """Base of plugins: admits everything. Override what is to be judged."""

    name: str = "plugin"

    def pre_create_pool(self, request: PoolRequest) -> PoolAdmission | Awaitable[PoolAdmission]:
        """Judge a pool that is about to be made."""
        return ADMITTED

    def pre_update_pool(self, request: PoolRequest) -> PoolAdmission | Awaitable[PoolAdmission]:
        """Judge a change of a pool's size or spec."""
        return ADMITTED

    def pre_delete_pool(self, request: PoolRequest) -> PoolAdmission | Awaitable[PoolAdmission]:
        """Judge the end of a pool; admitting less than its size keeps it."""
        return ADMITTED


def merged(answers: list[PoolAdmission]) -> PoolAdmission:
    """Take several answers as one: the smallest size, the longest wait, that plugin's reason."""
    limits = [item for item in answers if item.admitted is not None]
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
