"""Waiting items, handed out in turns: first between groups, then between the lanes of a group.

Groups are teams, lanes are kinds of work. Between two items of one group at most one item of each
other group is handed out, and likewise between lanes. So a thousand items of one group do not delay
another group's first. Nothing here waits or uses a clock.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


def may_start(running: int, free: int) -> bool:
    """Whether a group that holds `running` slots may take one of the `free` slots.

    A group that holds some leaves as many free. So it can use half of all slots when it is alone,
    and a group that holds none finds a slot unless very many groups are busy at once.
    """
    return running < free


class FairQueue(Generic[T]):
    """A queue of groups of lanes; an item is in it at most once."""

    def __init__(self) -> None:
        self._groups: OrderedDict[str, OrderedDict[str, OrderedDict[T, None]]] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        """Return the number of items."""
        return self._size

    def count(self, group: str) -> int:
        """Return the number of items of one group."""
        lanes = self._groups.get(group)
        return 0 if lanes is None else sum(map(len, lanes.values()))

    def push(self, group: str, item: T, lane: str = "") -> None:
        """Append an item to its lane."""
        lanes = self._groups.get(group)
        if lanes is None:
            lanes = self._groups[group] = OrderedDict()
        items = lanes.get(lane)
        if items is None:
            items = lanes[lane] = OrderedDict()
        items[item] = None
        self._size += 1

    def pop(self, is_allowed: Callable[[str], bool] | None = None) -> tuple[str, T] | None:
        """Remove and return the next item of an allowed group; None if there is none."""
        for group in self._groups:
            if is_allowed is None or is_allowed(group):
                break
        else:
            return None
        lanes = self._groups[group]
        lane, items = next(iter(lanes.items()))
        item, _ = items.popitem(last=False)
        self._size -= 1
        # Both have been served: behind all others, if something is left.
        if items:
            lanes.move_to_end(lane)
        else:
            del lanes[lane]
        if lanes:
            self._groups.move_to_end(group)
        else:
            del self._groups[group]
        return group, item

    def remove(self, group: str, item: T, lane: str = "") -> bool:
        """Remove an item that no longer waits; whether it was there."""
        lanes = self._groups.get(group)
        items = None if lanes is None else lanes.get(lane)
        if items is None or item not in items:
            return False
        del items[item]
        self._size -= 1
        self._prune(group, lane)
        return True

    def defer(self, group: str, lane: str = "") -> None:
        """Put a group, and this lane of it, behind all others: it has just been served."""
        lanes = self._groups.get(group)
        if lanes is None:
            return
        self._groups.move_to_end(group)
        if lane in lanes:
            lanes.move_to_end(lane)

    def clear(self) -> None:
        """Remove all items."""
        self._groups.clear()
        self._size = 0

    def _prune(self, group: str, lane: str) -> None:
        lanes = self._groups[group]
        if not lanes[lane]:
            del lanes[lane]
        if not lanes:
            del self._groups[group]
