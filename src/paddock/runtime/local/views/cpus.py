"""Which CPUs a sandbox may run on: as many as its limit, rounded up.

Programs ask for their CPU affinity to choose a number of threads. The limit itself is enforced by
the CPU quota of the cgroup. Sandboxes are spread so that every CPU has about the same share.
"""

import os
from collections.abc import Iterable

_MILLIS = 1000


class CpuChoice:
    """The CPUs of this node, and the share of each that sandboxes were given."""

    def __init__(self, cpus: Iterable[int] | None = None) -> None:
        """`cpus` defaults to those the node itself may use."""
        self.all = frozenset(os.sched_getaffinity(0) if cpus is None else cpus)
        self._shares = dict.fromkeys(sorted(self.all), 0.0)
        self._by_name: dict[str, tuple[frozenset[int], float]] = {}

    def count(self, cpu_millis: int | None) -> int:
        """Return the number of CPUs that a limit allows; at most all."""
        if not cpu_millis:
            return len(self.all)
        return min(len(self.all), -(-cpu_millis // _MILLIS))

    def choose(self, name: str, cpu_millis: int | None) -> frozenset[int]:
        """Return the CPUs of a slot: the same ones for the same number, else the least used."""
        count = self.count(cpu_millis)
        before, _ = self._by_name.get(name, (frozenset[int](), 0.0))
        if len(before) == count:
            return before
        least = sorted(self._shares, key=lambda cpu: (self._shares[cpu], cpu))
        return self.assign(name, least[:count], cpu_millis)

    def assign(self, name: str, cpus: Iterable[int], cpu_millis: int | None) -> frozenset[int]:
        """Record the CPUs of a slot, for example of an adopted sandbox."""
        self.release(name)
        chosen = frozenset(cpus) & self.all or self.all
        share = (cpu_millis or _MILLIS * len(self.all)) / len(chosen)
        self._by_name[name] = (chosen, share)
        for cpu in chosen:
            self._shares[cpu] += share
        return chosen

    def move(self, name: str, cpus: frozenset[int]) -> None:
        """Record other CPUs of a slot, as many as before."""
        before, share = self._by_name[name]
        self._by_name[name] = (cpus, share)
        for cpu in before:
            self._shares[cpu] -= share
        for cpu in cpus:
            self._shares[cpu] += share

    def restricted(self, name: str) -> frozenset[int] | None:
        """Return the CPUs of a slot, or `None` if it may use all."""
        cpus, _ = self._by_name.get(name, (self.all, 0.0))
        return cpus if len(cpus) < len(self.all) else None

    def release(self, name: str) -> None:
        """Forget a slot."""
        cpus, share = self._by_name.pop(name, (frozenset[int](), 0.0))
        for cpu in cpus:
            self._shares[cpu] -= share
