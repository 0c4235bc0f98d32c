"""Numbers of running sandboxes, from which their ids and the names of their groups follow."""

from paddock.kit.errors import UnavailableError
from paddock.runtime.local.launch.protocol import RANGE

_FIRST_ID = 0x40000000
_SLOTS = 3072
_REGIONS = 15
"""Nodes of one machine take different regions of ids, chosen by their state directory."""


class Slots:
    """Numbers that name a running sandbox's ids and groups; none is used by two at once."""

    def __init__(self, seed: int) -> None:
        self._first = _FIRST_ID + seed % _REGIONS * _SLOTS * RANGE
        self._taken: set[int] = set()
        self._last = -1

    def take(self) -> int:
        """Take a free one, round the circle, so that one rests before it is used again."""
        if len(self._taken) >= _SLOTS:
            raise UnavailableError(f"all {_SLOTS} places for sandboxes on this node are taken")
        slot = (self._last + 1) % _SLOTS
        while slot in self._taken:
            slot = (slot + 1) % _SLOTS
        self._last = slot
        self._taken.add(slot)
        return slot

    def claim(self, slot: int) -> None:
        """Take the one that an adopted sandbox has."""
        self._taken.add(slot)

    def free(self, slot: int) -> None:
        """Give one back."""
        self._taken.discard(slot)

    def is_taken(self, slot: int) -> bool:
        """Say whether somebody has it."""
        return slot in self._taken

    def base(self, slot: int) -> int:
        """Give the first id of a slot's range."""
        return self._first + slot * RANGE


def group_name(slot: int) -> str:
    """Name the groups of a slot."""
    return f"s{slot}"
