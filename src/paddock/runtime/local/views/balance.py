"""Decides which sandboxes move to other CPUs: busy ones must not share one while another idles.

A sandbox with a CPU limit runs on few CPUs (`cpus.py`), which the kernel's scheduler cannot change.
"""

from collections.abc import Iterable, Mapping

from msgspec import Struct

_TOLERATED = 0.3
"""CPUs. A smaller difference between the most and the least used CPU is left alone."""
_MOST_MOVES = 16
"""Per plan; the next plan follows seconds later."""


class CpuUse(Struct, frozen=True):
    """The CPUs of a slot, and how many CPUs it has used on average since the last plan."""

    cpus: frozenset[int]
    used: float

    @property
    def share(self) -> float:
        """Its part of each of its CPUs; the kernel spreads threads evenly."""
        return self.used / len(self.cpus)


def plan(uses: Mapping[str, CpuUse], cpus: Iterable[int]) -> dict[str, frozenset[int]]:
    """Return the new CPUs of the slots to move."""
    now = dict(uses)
    loads = dict.fromkeys(sorted(cpus), 0.0)
    for use in now.values():
        for cpu in use.cpus:
            loads[cpu] = loads.get(cpu, 0.0) + use.share
    moved: dict[str, frozenset[int]] = {}
    for _ in range(_MOST_MOVES):
        most, least = max(loads, key=loads.__getitem__), min(loads, key=loads.__getitem__)
        gap = loads[most] - loads[least]
        if gap <= _TOLERATED:
            break
        # Only a share below the gap makes the two more even; half of it makes them equal.
        candidates = [
            name
            for name, use in now.items()
            if most in use.cpus and least not in use.cpus and 0 < use.share < gap
        ]
        if not candidates:
            break
        name = min(candidates, key=lambda one: (abs(now[one].share - gap / 2), one))
        use = now[name]
        loads[most] -= use.share
        loads[least] += use.share
        moved[name] = use.cpus - {most} | {least}
        now[name] = CpuUse(moved[name], use.used)
    return moved
