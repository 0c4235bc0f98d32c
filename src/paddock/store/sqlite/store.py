"""The sqlite store: opening, recovery after a restart, closing."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from paddock.kit.clock import Clock, system
from paddock.resources import codec
from paddock.resources.meta import Resource
from paddock.store import namespaces
from paddock.store.embedded import KINDS, EmbeddedStore
from paddock.store.port import Store
from paddock.store.sqlite.database import Database
from paddock.store.sqlite.journal import GroupCommit, row
from paddock.store.sqlite.loading import load
from paddock.store.sqlite.lock import FileLock
from paddock.store.table import DEFAULT_HISTORY
from paddock.store.working_set import WorkingSet


class SqliteStore(EmbeddedStore):
    """A store in one SQLite file. Create it with `open`."""

    def __init__(
        self,
        working: WorkingSet,
        database: Database,
        lock: FileLock,
        *,
        clock: Clock | None,
        enforce_namespaces: bool,
    ) -> None:
        super().__init__(
            working,
            GroupCommit(working, database),
            clock=clock,
            enforce_namespaces=enforce_namespaces,
        )
        self._lock = lock

    @classmethod
    async def open(
        cls,
        path: Path,
        *,
        clock: Clock | None = None,
        kinds: Sequence[type[Resource]] = KINDS,
        history: int = DEFAULT_HISTORY,
        enforce_namespaces: bool = False,
    ) -> Self:
        """Open or create the file; `UnavailableError` names the process that holds it."""

        def prepare() -> tuple[Database, WorkingSet]:
            # The file contains secrets: create it with mode 0600 before SQLite opens it.
            path.touch(mode=0o600)
            database = Database(path, history=history)
            try:
                working = load(database, kinds, history=history)
                if enforce_namespaces:
                    _add_namespaces(working, database, clock or system())
            except BaseException:
                database.close()
                raise
            return database, working

        for kind in kinds:
            codec.decoder(kind)  # build decoders here, not in the thread: see docs/decisions/0080
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = FileLock(path.with_name(path.name + ".lock"))
        try:
            database, working = await asyncio.to_thread(prepare)
        except BaseException:
            lock.release()
            raise
        store = cls(working, database, lock, clock=clock, enforce_namespaces=enforce_namespaces)
        store.collect_uncollected()
        return store

    async def close(self) -> None:
        """Flush, close the file and release the lock."""
        try:
            await super().close()
        finally:
            self._lock.release()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()


def _add_namespaces(working: WorkingSet, database: Database, clock: Clock) -> None:
    mutations = namespaces.create_defaults(working, clock.now())
    if mutations:
        database.write([row(mutation) for mutation in mutations])
        working.apply(mutations)


_: type[Store] = SqliteStore
