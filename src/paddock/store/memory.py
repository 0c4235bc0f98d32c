"""The memory store: everything in memory, durable as long as the process is.

The reference for what a store means, and the store of tests.
"""

import asyncio
from collections.abc import Sequence

from paddock.kit.clock import Clock, system
from paddock.resources.meta import Resource
from paddock.store import namespaces
from paddock.store.embedded import KINDS, EmbeddedStore
from paddock.store.port import Store
from paddock.store.table import DEFAULT_HISTORY
from paddock.store.working_set import Mutation, WorkingSet


class _NoJournal:
    def __init__(self, working: WorkingSet) -> None:
        self._working = working

    async def commit(self, mutations: Sequence[Mutation]) -> None:
        for mutation in mutations:
            self._working.index(mutation.place, mutation.entry.object)
        self._working.apply(mutations)
        # Yield at every write, as a write that takes time does.
        await asyncio.sleep(0)

    async def close(self) -> None:
        pass


class MemoryStore(EmbeddedStore):
    """A store in memory only."""

    def __init__(
        self,
        *,
        clock: Clock | None = None,
        kinds: Sequence[type[Resource]] = KINDS,
        history: int = DEFAULT_HISTORY,
        enforce_namespaces: bool = False,
    ) -> None:
        working = WorkingSet(kinds, history=history)
        if enforce_namespaces:
            working.apply(namespaces.missing(working, (clock or system()).now()))
        super().__init__(
            working, _NoJournal(working), clock=clock, enforce_namespaces=enforce_namespaces
        )


_: type[Store] = MemoryStore
