"""Whether the sandbox was frozen when a client left.

A pause of the sandbox ends the connections of its clients, just before it or after it. A run then
goes on; it is interrupted only if the client itself has left. A frozen process cannot notice that
it is frozen, and neither its clock nor its counters tell a short pause from a busy machine. But
Linux ends some calls with EINTR when it stops a thread that waits in them, by the freezer or for a
checkpoint: a receive with a timeout is one of them (signal(7)).
"""

import asyncio
import ctypes
import errno
import signal
import socket
import struct
import threading
import time

_TIMEOUT = struct.pack("ll", 10**6, 0)
"""Seconds and microseconds. Without a timeout, Linux continues the call instead of ending it."""
_TICK_SECONDS = 0.1
_GRACE_SECONDS = 1.0
"""A sandbox is frozen within this time after its connections were ended."""


class FreezeWatch:
    """Notes when the process was frozen. An idle server has no timers: a thread waits."""

    def __init__(self) -> None:
        self._frozen_at = float("-inf")
        self._thread: threading.Thread | None = None
        self._theirs: socket.socket | None = None

    def start(self) -> None:
        """Begin to watch; without effect if it has begun."""
        if self._thread is not None:
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEOUT)
        self._thread = threading.Thread(
            target=self._watch, args=(ours, theirs), name="freezes", daemon=True
        )
        self._thread.start()
        self._theirs = theirs

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None and self._theirs is not None:
            self._theirs.send(b"end")
            self._thread.join()
            self._thread = None

    async def was_frozen(self) -> bool:
        """Whether the sandbox was frozen just before now, or is within a moment."""
        began = time.monotonic()
        # Ticks and not the clock: during a freeze it goes on, and the thread needs a moment after.
        for _ in range(round(_GRACE_SECONDS / _TICK_SECONDS) + 1):
            if self._frozen_at >= began - _GRACE_SECONDS:
                return True
            await asyncio.sleep(_TICK_SECONDS)
        return False

    def _watch(self, ours: socket.socket, theirs: socket.socket) -> None:
        # Handlers of signals belong to the main thread; here they would look like a freeze.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        library = ctypes.CDLL(None, use_errno=True)  # Python itself repeats an interrupted call.
        word = ctypes.create_string_buffer(8)
        with ours, theirs:
            while library.recv(ours.fileno(), word, len(word), 0) < 0:
                if ctypes.get_errno() == errno.EINTR:
                    self._frozen_at = time.monotonic()
