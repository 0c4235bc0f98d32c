"""Logs of template builds, written and read outside the event loop.

`append` only keeps an entry in memory. A thread writes what has come in, many entries at a time: a
build that prints much delays no call. Readers see every entry that was appended before. What is
kept of a build in memory is bounded by the size of its log.
"""

import asyncio
import logging
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from paddock.builds.log_files import (
    MAX_BYTES,
    MAX_LINES,
    RESERVE_BYTES,
    BuildLogEntry,
    LogFiles,
    NewEntry,
    check_uid,
    matters,
)
from paddock.kit.clock import Clock
from paddock.kit.logs import fields

log = logging.getLogger(__name__)


class BuildLogs:
    """Appends to logs and reads them. One process writes. A build is named by its object's UID."""

    def __init__(
        self,
        directory: Path,
        clock: Clock,
        *,
        max_bytes: int = MAX_BYTES,
        max_lines: int = MAX_LINES,
        ensure_room: Callable[[str, int], None] | None = None,
    ) -> None:
        self._files = LogFiles(
            directory, max_bytes=max_bytes, max_lines=max_lines, ensure_room=ensure_room
        )
        self._clock = clock
        self._max_bytes = max_bytes
        self._max_lines = max_lines
        self._pending: dict[str, list[NewEntry]] = {}
        """Entries that are not being written yet, by build."""
        self._bytes: dict[str, int] = {}
        """Bytes of the pending entries, by build."""
        self._writing: asyncio.Future[None] | None = None

    def append(self, uid: str, message: str, *, level: str = "info", step: str = "") -> None:
        """Append one entry. It is dropped if the log is full, or the disk."""
        check_uid(uid)
        if not self._has_room(uid, level):
            return
        entry = NewEntry.of(self._clock.now(), level, message, step)
        self._pending.setdefault(uid, []).append(entry)
        self._bytes[uid] = self._bytes.get(uid, 0) + len(entry.data)
        self._start()

    async def read(
        self, uid: str, *, offset: int = 0, limit: int = 100, level: str = "debug"
    ) -> tuple[BuildLogEntry, ...]:
        """Return entries of this level and above, oldest first, from the entry `offset` on."""
        await self.flush()
        return await asyncio.to_thread(self._files.read, uid, offset, limit, level)

    async def page(
        self, uid: str, *, cursor: datetime | None, limit: int, level: str, backward: bool
    ) -> tuple[BuildLogEntry, ...]:
        """Return entries from a time on; or those before it, newest first."""
        await self.flush()
        return await asyncio.to_thread(self._files.page, uid, cursor, limit, level, backward)

    async def remove(self, uid: str) -> None:
        """Delete the log of a build; it may not exist."""
        self._pending.pop(uid, None)
        self._bytes.pop(uid, None)
        if self._writing is not None:
            await asyncio.wait((self._writing,))
        await asyncio.to_thread(self._files.remove, uid)

    async def uids(self) -> frozenset[str]:
        """Return the UIDs of builds that have a log."""
        return await asyncio.to_thread(self._files.uids)

    async def sizes(self) -> dict[str, int]:
        """Return the bytes of each log, by UID of its build."""
        return await asyncio.to_thread(self._files.sizes)

    async def flush(self) -> None:
        """Wait until the entries that were appended before are written."""
        if self._writing is not None:
            await asyncio.wait((self._writing,))
        self._start()
        if self._writing is not None:
            await asyncio.wait((self._writing,))

    def _has_room(self, uid: str, level: str) -> bool:
        """Whether an entry may still fit. The thread decides for each when it writes."""
        waiting, size = len(self._pending.get(uid, ())), self._bytes.get(uid, 0)
        if matters(level):
            return size < self._max_bytes + RESERVE_BYTES
        # One more than fits: the thread then sees that the log is full, and says so.
        is_waiting_for_more = waiting <= self._max_lines and size <= self._max_bytes
        return is_waiting_for_more and not self._files.is_full(uid)

    def _start(self) -> None:
        """Write what is pending, unless a write goes on: that one starts the next."""
        if self._writing is not None or not self._pending:
            return
        taken, self._pending, self._bytes = self._pending, {}, {}
        loop = asyncio.get_running_loop()
        self._writing = loop.run_in_executor(None, self._files.write, taken)
        self._writing.add_done_callback(self._written)

    def _written(self, done: "asyncio.Future[None]") -> None:
        self._writing = None
        if done.cancelled():
            return
        if (error := done.exception()) is not None:
            log.error("build log was not written", extra=fields(error=repr(error)))
        self._start()
