"""The memory store: objects live as long as the process.

The reference implementation of the embedded store, and the store of most tests.
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
        # Yield at every write, as a backend with I/O does.
        await asyncio.sleep(0)

    async def close(self) -> None:
        pass


class MemoryStore(EmbeddedStore):
    """A store without persistence."""

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
            working.apply(namespaces.create_defaults(working, (clock or system()).now()))
        super().__init__(
            working, _NoJournal(working), clock=clock, enforce_namespaces=enforce_namespaces
        )


_: type[Store] = MemoryStore
