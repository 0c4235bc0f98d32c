"""Directories for sandboxes to come, each with the sockets where their envds will be called.

Some file systems take half a millisecond for every file they make, so a few directories are kept
ready and moved to their place when a sandbox gets one. A socket can be reached wherever its file
is moved. Nothing of this outlives a node: its sockets are dead then, and the next one begins anew.
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

DOOR, INNER_DOOR = "envd.sock", "control.sock"
_KEPT = 4
_BREATH = 0.05
"""Seconds in which nobody took one, before the stock is filled up."""


class Sockets(NamedTuple):
    """Both listen: for callers, and for the node itself."""

    outer: socket.socket
    inner: socket.socket


class Premises:
    """The stock; filled by whoever has a thread to spare."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._ready: collections.deque[tuple[str, Sockets]] = collections.deque()
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._is_open = False

    def open(self) -> None:
        """Begin anew, in a directory that nobody else uses; blocks."""
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory.mkdir(mode=0o700, exist_ok=True)
        self._is_open = True
        self._fill()

    def take(self, place: str) -> Sockets | None:
        """Move one to its place; `None` if none is ready."""
        if not self._ready:
            return None
        path, sockets = self._ready.popleft()
        try:
            os.rename(path, place)
        except OSError:  # somebody removed it; whoever asks makes his own
            _close(sockets)
            return None
        self._fill_soon()
        return sockets

    def close(self) -> None:
        """Remove what nobody took."""
        self._is_open = False
        if self._timer is not None:
            self._timer.cancel()
        self._clear()

    def _fill_soon(self) -> None:
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_later(_BREATH, lambda: loop.run_in_executor(None, self._fill))

    def _fill(self) -> None:
        # Where it cannot be done now, sandboxes make their own and hear why that fails.
        with contextlib.suppress(OSError):
            while self._is_open and len(self._ready) < _KEPT:
                self._ready.append(_make(f"{self._directory}/{next(self._numbers)}"))
        if not self._is_open:  # closed meanwhile: what was made since is nobody's
            self._clear()

    def _clear(self) -> None:
        with contextlib.suppress(IndexError):  # a thread that fills may clear, too
            while True:
                _close(self._ready.popleft()[1])
        shutil.rmtree(self._directory, ignore_errors=True)


def _make(path: str) -> tuple[str, Sockets]:
    os.mkdir(path, 0o700)
    for name in ("record.0", "record.1"):
        os.close(os.open(f"{path}/{name}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
    outer = rpc.listen(f"{path}/{DOOR}")
    try:
        return path, Sockets(outer, rpc.listen(f"{path}/{INNER_DOOR}"))
    except BaseException:
        outer.close()
        raise


def _close(sockets: Sockets) -> None:
    for one in sockets:
        one.close()
