"""Background deletion: trees are renamed into the trash and removed by a thread.

Removing a tree can be slow (a disk with `discard` needs milliseconds per file), and destroying a
sandbox must not wait for it. `resume` removes what a crash left in the trash.
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
    """Two trash directories (one per file system) and the thread that empties them."""

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

    def discard_tree(self, path: Path) -> None:
        """Delete a tree of the backend."""
        self._discard(path, self._trees)

    def discard_memory(self, path: Path) -> None:
        """Delete a directory of stored memory; a missing one is ignored."""
        self._discard(path, self._memory)

    def resume(self) -> None:
        """Delete what an earlier process left in the trash."""
        for directory in (self._trees, self._memory):
            for name in os.listdir(directory):
                self._enqueue(directory / name)

    def wait_deleted(self) -> None:
        """Wait until all queued deletions are finished."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending == 0)

    def close(self) -> None:
        """Finish all deletions and end the thread."""
        thread = self._thread
        if thread is None:
            return
        self._queue.put(None)
        thread.join()
        self._thread = None

    def _discard(self, path: Path, bin_: Path) -> None:
        target = bin_ / f"{path.name}.{uuid.uuid4().hex[:12]}"
        with contextlib.suppress(FileNotFoundError):
            path.rename(target)
            self._enqueue(target)

    def _enqueue(self, target: Path) -> None:
        with self._changed:
            self._pending += 1
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="storage-trash", daemon=True
                )
                self._thread.start()
        self._queue.put(target)

    def _work(self) -> None:
        while (target := self._queue.get()) is not None:
            try:
                self._remove(target)
            except OSError as error:
                # It stays in the trash; the next start retries.
                log.warning(
                    "deletion of discarded files failed",
                    extra=fields(path=str(target), error=str(error)),
                )
            finally:
                with self._changed:
                    self._pending -= 1
                    self._changed.notify_all()

    def _remove(self, target: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            if target.parent == self._trees:
                self._backend.remove_tree(target)
            elif target.is_dir():
                shutil.rmtree(target)
            else:
                target.unlink()
