"""Slot numbers of running sandboxes; they determine id ranges and cgroup names."""

from paddock.kit.errors import UnavailableError
from paddock.runtime.local.launch.protocol import RANGE

_FIRST_ID = 0x40000000
_SLOTS = 3072
_REGIONS = 15
"""Nodes of one machine use different regions of ids, chosen by their state directory."""


class SandboxSlots:
    """Allocates slots; no two running sandboxes have the same one."""

    def __init__(self, seed: int) -> None:
        self._first = _FIRST_ID + seed % _REGIONS * _SLOTS * RANGE
        self._taken: set[int] = set()
        self._last = -1

    def acquire(self) -> int:
        """Allocate a free slot, round robin, so that a released one is not reused at once."""
        if len(self._taken) >= _SLOTS:
            raise UnavailableError(f"all {_SLOTS} sandbox slots of this node are in use")
        slot = (self._last + 1) % _SLOTS
        while slot in self._taken:
            slot = (slot + 1) % _SLOTS
        self._last = slot
        self._taken.add(slot)
        return slot

    def reserve(self, slot: int) -> None:
        """Mark the slot of an adopted sandbox as taken."""
        self._taken.add(slot)

    def release(self, slot: int) -> None:
        self._taken.discard(slot)

    def is_taken(self, slot: int) -> bool:
        return slot in self._taken

    def first_id(self, slot: int) -> int:
        """Return the first uid and gid of a slot's range."""
        return self._first + slot * RANGE


def cgroup_name(slot: int) -> str:
    """Return the name of a slot's cgroups."""
    return f"s{slot}"
