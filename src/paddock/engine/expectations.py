"""What a controller has done and its informer has not shown yet.

Within one process `Writer` makes reads as new as writes, so these are for what it cannot cover:
a conflict proves that a newer version exists; several creations are in flight while their
informer is filtered or far behind. Every expectation has a timeout, so that one event that
never comes cannot stop a controller for ever.
"""

import logging
from collections.abc import Hashable
from typing import Generic, TypeVar

from msgspec import Struct

from paddock.engine.versions import version_of
from paddock.kit.clock import Clock
from paddock.kit.logs import fields
from paddock.resources.meta import Resource

log = logging.getLogger(__name__)

TIMEOUT_SECONDS = 60.0

K = TypeVar("K", bound=Hashable)


class _Expected(Struct, frozen=True):
    version: int
    at: float


class VersionExpectations:
    """Per object (by uid): nothing older than this version may be acted upon."""

    def __init__(self, clock: Clock, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self._clock = clock
        self._timeout_seconds = timeout_seconds
        self._expected: dict[str, _Expected] = {}

    def __len__(self) -> int:
        return len(self._expected)

    def expect(self, written: Resource) -> None:
        """Expect to see what a write returned, or something newer."""
        self._raise_to(written.metadata.uid, version_of(written))

    def expect_newer(self, read: Resource) -> None:
        """Expect something newer than what was read: a conflict has proved that it exists."""
        self._raise_to(read.metadata.uid, version_of(read) + 1)

    def is_satisfied(self, seen: Resource) -> bool:
        """Say whether an object as seen may be acted upon."""
        uid = seen.metadata.uid
        expected = self._expected.get(uid)
        if expected is None:
            return True
        if version_of(seen) < expected.version:
            if self._clock.monotonic() - expected.at < self._timeout_seconds:
                return False
            log.warning(
                "expected version never came",
                extra=fields(kind=seen.KIND, key=seen.key, version=expected.version),
            )
        del self._expected[uid]
        return True

    def forget(self, gone: Resource) -> None:
        """Expect nothing more of an object that is gone."""
        self._expected.pop(gone.metadata.uid, None)

    def _raise_to(self, uid: str, version: int) -> None:
        known = self._expected.get(uid)
        if known is None or known.version < version:
            self._expected[uid] = _Expected(version, self._clock.monotonic())


class ScaleExpectations(Generic[K]):
    """Per owner: children whose creation or deletion was asked for and not seen yet."""

    def __init__(self, clock: Clock, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self._clock = clock
        self._timeout_seconds = timeout_seconds
        self._creations: dict[K, dict[str, float]] = {}
        self._deletions: dict[K, dict[str, float]] = {}

    def __len__(self) -> int:
        """Say how many owners expect something."""
        return len(self._creations.keys() | self._deletions.keys())

    def expect_creation(self, owner: K, child: str) -> None:
        """Expect a child (by name) to appear; call before creating it."""
        self._creations.setdefault(owner, {})[child] = self._clock.monotonic()

    def expect_deletion(self, owner: K, child: str) -> None:
        """Expect a child (by uid) to go; call before deleting it."""
        self._deletions.setdefault(owner, {})[child] = self._clock.monotonic()

    def saw_creation(self, owner: K, child: str) -> None:
        """Note that a child has appeared, or that its creation has failed."""
        _strike(self._creations, owner, child)

    def saw_deletion(self, owner: K, child: str) -> None:
        """Note that a child is gone, or that its deletion has failed."""
        _strike(self._deletions, owner, child)

    def pending_creations(self, owner: K) -> int:
        """Count creations that are asked for and not seen."""
        return self._pending(self._creations, owner, "creation")

    def pending_deletions(self, owner: K) -> int:
        """Count deletions that are asked for and not seen."""
        return self._pending(self._deletions, owner, "deletion")

    def is_satisfied(self, owner: K) -> bool:
        """Say whether everything that was asked for has been seen."""
        return not self.pending_creations(owner) and not self.pending_deletions(owner)

    def forget(self, owner: K) -> None:
        """Expect nothing more of an owner that is gone."""
        self._creations.pop(owner, None)
        self._deletions.pop(owner, None)

    def _pending(self, table: dict[K, dict[str, float]], owner: K, what: str) -> int:
        children = table.get(owner)
        if children is None:
            return 0
        horizon = self._clock.monotonic() - self._timeout_seconds
        for child in [child for child, at in children.items() if at <= horizon]:
            log.warning(
                "expected change was never seen",
                extra=fields(owner=owner, child=child, change=what),
            )
            _strike(table, owner, child)
        return len(children)


def _strike(table: dict[K, dict[str, float]], owner: K, child: str) -> None:
    children = table.get(owner)
    if children is None:
        return
    children.pop(child, None)
    if not children:
        del table[owner]
