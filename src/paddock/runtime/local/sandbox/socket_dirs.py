"""A stock of sandbox directories, each with listening envd sockets.

Some file systems take half a millisecond to create a file, so a few directories are created in
advance and renamed when a sandbox needs one. A socket stays reachable after its file is renamed.
The stock does not outlive the node: the next node process creates a new one.
"""

import asyncio
import collections
import contextlib
import itertools
import os
import shutil
import socket
from pathlib import Path
from typing import NamedTuple

from paddock.runtime.local.node import rpc

ENVD_SOCKET, CONTROL_SOCKET = "envd.sock", "control.sock"
_READY_COUNT = 4
_REFILL_DELAY_SECONDS = 0.05
"""Seconds without a `take` before the stock is refilled."""


class EnvdSockets(NamedTuple):
    """Two listening sockets: one for callers, one for the node."""

    envd: socket.socket
    control: socket.socket


class SocketDirs:
    """The stock; it is refilled in a thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._ready: collections.deque[tuple[str, EnvdSockets]] = collections.deque()
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._is_open = False

    def open(self) -> None:
        """Empty the directory and fill the stock. Blocks; the directory must not be shared."""
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory.mkdir(mode=0o700, exist_ok=True)
        self._is_open = True
        self._refill()

    def take(self, place: str) -> EnvdSockets | None:
        """Rename a directory to `place` and return its sockets; `None` if none is ready."""
        if not self._ready:
            return None
        path, sockets = self._ready.popleft()
        try:
            os.rename(path, place)
        except OSError:  # it was removed; the caller creates its own
            _close(sockets)
            return None
        self._refill_soon()
        return sockets

    def close(self) -> None:
        """Remove the directories that were not taken."""
        self._is_open = False
        if self._timer is not None:
            self._timer.cancel()
        self._clear()

    def _refill_soon(self) -> None:
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_later(
            _REFILL_DELAY_SECONDS, lambda: loop.run_in_executor(None, self._refill)
        )

    def _refill(self) -> None:
        # On failure sandboxes create their own directories and report the error.
        with contextlib.suppress(OSError):
            while self._is_open and len(self._ready) < _READY_COUNT:
                self._ready.append(_make(f"{self._directory}/{next(self._numbers)}"))
        if not self._is_open:  # closed meanwhile: remove what was created since
            self._clear()

    def _clear(self) -> None:
        with contextlib.suppress(IndexError):  # a refilling thread may clear, too
            while True:
                _close(self._ready.popleft()[1])
        shutil.rmtree(self._directory, ignore_errors=True)


def _make(path: str) -> tuple[str, EnvdSockets]:
    os.mkdir(path, 0o700)
    for name in ("record.0", "record.1"):
        os.close(os.open(f"{path}/{name}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
    outer = rpc.listen(f"{path}/{ENVD_SOCKET}")
    try:
        return path, EnvdSockets(outer, rpc.listen(f"{path}/{CONTROL_SOCKET}"))
    except BaseException:
        outer.close()
        raise


def _close(sockets: EnvdSockets) -> None:
    for one in sockets:
        one.close()
