"""Pipes from a shell: what it prints, and the status of each run.

A pipe is read all the time, so that programs in the background never wait for a reader. What they
print while no code runs is dropped.
"""

import asyncio
import codecs
import contextlib
import fcntl
import os
from collections import deque

from code_interpreter.kernels.event_queue import EventQueue
from code_interpreter.kernels.events import Output

_CHUNK = 65536


class _Pipe:
    """A pipe that is read by the event loop."""

    def __init__(self) -> None:
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)
        self._is_reading = False

    def start(self) -> None:
        """Begin to read: the shell has its own copy of the other end."""
        if self.writer >= 0:
            os.close(self.writer)
            self.writer = -1
        self.resume()

    def pause(self) -> None:
        """Stop reading."""
        if self._is_reading:
            self._is_reading = False
            asyncio.get_running_loop().remove_reader(self._reader)

    def resume(self) -> None:
        """Read again."""
        if not self._is_reading and self._reader >= 0:
            self._is_reading = True
            asyncio.get_running_loop().add_reader(self._reader, self._read)

    def close(self) -> None:
        """Close the pipe."""
        self.pause()
        for descriptor in (self._reader, self.writer):
            if descriptor >= 0:
                os.close(descriptor)
        self._reader = self.writer = -1

    def _read(self) -> bool:
        """Read once; return whether there was something."""
        try:
            data = os.read(self._reader, _CHUNK)
        except BlockingIOError:
            return False
        if not data:  # every writer has closed it
            self.pause()
            return False
        self._take(data)
        return True

    def _take(self, data: bytes) -> None:
        raise NotImplementedError


class OutputPipe(_Pipe):
    """What is printed to one stream."""

    def __init__(self, stream: str) -> None:
        super().__init__()
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.queue: EventQueue | None = None
        """Takes the output of the present run."""

    def finish(self) -> None:
        """Read what the run has printed before its end; drop what follows."""
        # ValueError: the kernel was stopped meanwhile, which has closed the pipe.
        with contextlib.suppress(OSError, ValueError):
            for _ in range(_most_chunks(self._reader)):
                if not self._read():
                    break
        self._put(self._decoder.decode(b"", final=True))
        self.queue = None
        self._decoder.reset()

    def _take(self, data: bytes) -> None:
        self._put(self._decoder.decode(data))

    def _put(self, text: str) -> None:
        if text and self.queue is not None:
            self.queue.put(Output(self._stream, text))


class StatusPipe(_Pipe):
    """Words that end with NUL."""

    def __init__(self) -> None:
        super().__init__()
        self._words: deque[str] = deque()
        self._rest = b""
        self._arrived = asyncio.Event()

    async def read(self) -> str:
        """Return the next word."""
        while not self._words:
            self._arrived.clear()
            await self._arrived.wait()
        return self._words.popleft()

    def _take(self, data: bytes) -> None:
        *words, self._rest = (self._rest + data).split(b"\0")
        self._words.extend(word.decode(errors="replace") for word in words)
        if words:
            self._arrived.set()


def _most_chunks(descriptor: int) -> int:
    """Return how often a full pipe can be read: a program in the background may go on writing."""
    return fcntl.fcntl(descriptor, fcntl.F_GETPIPE_SZ) // _CHUNK + 1
