"""The sqlite store: opening, recovery after a restart, closing."""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from paddock.kit.clock import Clock, system
from paddock.kit.encryption import DataCipher
from paddock.kit.errors import PaddockError
from paddock.kit.logs import fields
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

log = logging.getLogger(__name__)

REWRITE_SECONDS = 2.0
"""Interval at which the store checks whether rows need another key."""
REWRITE_PAUSE_SECONDS = 0.02
"""Pause between two batches of rewritten rows."""
REWRITE_RETRY_SECONDS = 30.0


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
        self._database = database
        self._group_commit = GroupCommit(working, database)
        super().__init__(
            working, self._group_commit, clock=clock, enforce_namespaces=enforce_namespaces
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
        cipher: DataCipher | None = None,
    ) -> Self:
        """Open or create the file; `UnavailableError` names the process that holds it.

        New rows are encrypted with the key in use of `cipher`. `keep_encrypted` rewrites others.
        """

        def prepare() -> tuple[Database, WorkingSet]:
            # The file contains secrets: create it with mode 0600 before SQLite opens it.
            path.touch(mode=0o600)
            database = Database(path, history=history, cipher=cipher)
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

    @property
    def keys(self) -> frozenset[str]:
        """The keys that data in the file may be encrypted with; '' is plain text."""
        return self._database.keys

    async def rewrite(self) -> None:
        """Rewrite every row with the key in use, and remove what the earlier ones left."""
        has_more = True
        while has_more:
            has_more = await self._group_commit.run(self._database.rewrite)
            await asyncio.sleep(REWRITE_PAUSE_SECONDS)

    async def keep_encrypted(self) -> None:
        """Rewrite rows whenever the file may hold some of another key, or plain text."""
        while True:
            if self._database.needs_rewrite:
                try:
                    await self.rewrite()
                    log.info("store rewritten with the encryption key in use")
                except PaddockError as error:
                    log.warning("store not rewritten", extra=fields(error=error.message))
                    await asyncio.sleep(REWRITE_RETRY_SECONDS)
            await asyncio.sleep(REWRITE_SECONDS)

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
