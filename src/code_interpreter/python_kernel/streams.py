"""stdout and stderr of the kernel, sent in pieces.

The stream of ipykernel collects whatever is printed within 0.2 s into one message. A loop that
prints fast makes messages of many megabytes, and more of them than anyone reads. This one sends
pieces of limited size, and the code that prints waits until a piece was handed over. Output of
child processes, which comes through a pipe, belongs to the run in which they have written it.
"""

import codecs
import os
import select
import threading
import time
from typing import Any

from ipykernel.iostream import OutStream

_PIECE = 64 << 10
"""Characters."""
_DRAIN_SECONDS = 0.1
"""A program in the background may go on writing."""


class PacedStream(OutStream):
    """A stream whose writer waits when it has written much."""

    def __init__(self, *args: Any, watchfd: bool = True, **options: Any) -> None:
        self._collected = 0
        self._moving = threading.Lock()
        """Held while output of child processes is taken from the pipe."""
        # ipykernel leaves children out when pytest is somewhere above.
        super().__init__(*args, watchfd="force" if watchfd else False, **options)

    def write(self, string: str) -> int:
        """Write text; return its length."""
        if not isinstance(string, str):
            raise TypeError(f"write() argument must be str, not {type(string)}")
        for start in range(0, len(string), _PIECE):
            piece = string[start : start + _PIECE]
            super().write(piece)
            self._collected += len(piece)
            if self._collected >= _PIECE and self._is_sent_elsewhere():
                self._hand_over()
        return len(string)

    def flush(self) -> None:
        """Send what was written, also by child processes."""
        if not self._is_sent_elsewhere():
            super().flush()
            return
        self._drain()
        self._hand_over()

    def _is_sent_elsewhere(self) -> bool:
        """Whether another thread sends. A forked process has no other thread."""
        thread = self.pub_thread.thread if self.pub_thread else None
        is_own = thread is threading.current_thread() or os.getpid() != self._master_pid
        return thread is not None and not is_own and thread.is_alive()

    def _hand_over(self) -> None:
        self._collected = 0
        done = threading.Event()
        self.pub_thread.schedule(self._flush)
        self.pub_thread.schedule(done.set)
        # No limit of time: the process may be stopped meanwhile. An interrupt ends the wait.
        done.wait()

    def _watch_pipe_fd(self) -> None:
        """Move output of child processes into the stream. Runs in a thread."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        while self._should_watch:
            select.select([self._fid], [], [])
            with self._moving:
                data = os.read(self._fid, _PIECE)
                if not data:
                    return
                self.write(decoder.decode(data))

    def _drain(self) -> None:
        """Wait until all that child processes have written is in the stream."""
        if self._fid is None:
            return
        deadline = time.monotonic() + _DRAIN_SECONDS
        while time.monotonic() < deadline:
            with self._moving:
                if not select.select([self._fid], [], [], 0)[0]:
                    return
            time.sleep(0.0005)
