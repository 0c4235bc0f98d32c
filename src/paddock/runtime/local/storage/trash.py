"""Deleting later: what is thrown away leaves sight by a rename and is removed by a thread.

Removing a tree can take long (a disk with `discard` takes milliseconds for each file), and nobody
who destroys a sandbox should wait for it. What a crash leaves in the trash is removed by `resume`.
"""

import contextlib
import logging
import os
import queue
import shutil
import threading
import uuid
from pathlib import Path

from paddock.kit.logs import fields
from paddock.runtime.local.storage.backend import Backend

log = logging.getLogger(__name__)


class Trash:
    """Two directories of doomed things (one per file system) and the thread that empties them."""

    def __init__(self, trees: Path, memory: Path, backend: Backend) -> None:
        self._trees = trees
        self._memory = memory
        self._backend = backend
        self._queue: queue.SimpleQueue[Path | None] = queue.SimpleQueue()
        self._pending = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        for directory in (trees, memory):
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)

    def throw_tree(self, path: Path) -> None:
        """Doom a tree of the backend."""
        self._throw(path, self._trees)

    def throw_memory(self, path: Path) -> None:
        """Doom a directory of stored memory; a missing one is no error."""
        self._throw(path, self._memory)

    def resume(self) -> None:
        """Doom what an earlier process left in the trash."""
        for directory in (self._trees, self._memory):
            for name in os.listdir(directory):
                self._enqueue(directory / name)

    def settle(self) -> None:
        """Wait until everything doomed so far is gone."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending == 0)

    def close(self) -> None:
        """Finish, and end the thread."""
        thread = self._thread
        if thread is None:
            return
        self._queue.put(None)
        thread.join()
        self._thread = None

    def _throw(self, path: Path, bin_: Path) -> None:
        doomed = bin_ / f"{path.name}.{uuid.uuid4().hex[:12]}"
        with contextlib.suppress(FileNotFoundError):
            path.rename(doomed)
            self._enqueue(doomed)

    def _enqueue(self, doomed: Path) -> None:
        with self._changed:
            self._pending += 1
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="storage-trash", daemon=True
                )
                self._thread.start()
        self._queue.put(doomed)

    def _work(self) -> None:
        while (doomed := self._queue.get()) is not None:
            try:
                self._remove(doomed)
            except OSError as error:
                # It stays in the trash; the next start tries again.
                log.warning("could not delete", extra=fields(path=str(doomed), error=str(error)))
            finally:
                with self._changed:
                    self._pending -= 1
                    self._changed.notify_all()

    def _remove(self, doomed: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            if doomed.parent == self._trees:
                self._backend.remove_tree(doomed)
            elif doomed.is_dir():
                shutil.rmtree(doomed)
            else:
                doomed.unlink()
