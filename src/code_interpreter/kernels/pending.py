"""One request to a Jupyter kernel, and the messages that answer it.

A run has ended when the kernel publishes that it is idle again. A kernel that reports this before
it has sent all output prints a mark afterwards: then the run has ended when the mark arrives. Such
a kernel may ascribe the output, and also the value, to the request that prints the mark.
Messages that never arrive are waited for as long as others do, and a moment longer.
"""

import asyncio
import secrets

from code_interpreter.kernels import messages
from code_interpreter.kernels.event_queue import EventQueue
from code_interpreter.kernels.events import Accepted, Event, Failure
from code_interpreter.kernels.wire import Message

_LATE_SECONDS = 2.0
_OUTPUT = ("stream", "display_data", "execute_result")
"""The mark itself has no value."""


class PendingRun:
    """What has arrived of a run, and whether that is all."""

    def __init__(self, request: str, queue: EventQueue) -> None:
        self.id = request
        self.ended = asyncio.Event()
        self.mark_request = ""
        """Id of the request that prints the mark."""
        self._mark = ""
        self._queue = queue
        self._is_accepted = False
        self._failure: Failure | None = None
        self._has_failed = False
        self._late: asyncio.TimerHandle | None = None

    def expect_mark(self) -> str:
        """Return a mark that ends the run when it was printed."""
        self._mark = f"end of output {secrets.token_hex(16)}"
        return self._mark

    def take(self, message: Message) -> None:
        """Handle a published message."""
        if self._mark and message.kind == "stream" and self._mark in _text(message):
            self._finish()
        elif message.parent == self.mark_request and _is_idle(message):
            self._finish_later()
        elif message.parent == self.id or self._is_late_output(message):
            self._take_own(message)

    def _is_late_output(self, message: Message) -> bool:
        """Whether it is output of the run that the kernel ascribes to the request after it."""
        return message.parent == self.mark_request and message.kind in _OUTPUT

    def _take_own(self, message: Message) -> None:
        if self._late is not None:
            self._finish_later()
        if message.kind == "status":
            if _is_idle(message) and not self._mark:
                self._finish()
            return
        event = messages.event_of(message.kind, message.content)
        if event is not None and not self._is_repeated(event):
            self._queue.put(event)

    def _is_repeated(self, event: Event) -> bool:
        """Whether it is another error, or another beginning: the first one counts."""
        if isinstance(event, Failure):
            was_there, self._has_failed = self._has_failed, True
            return was_there
        if isinstance(event, Accepted):
            was_there, self._is_accepted = self._is_accepted, True
            return was_there
        return False

    def fail(self, failure: Failure) -> None:
        """Report a failure that is not the code's own; the run goes on."""
        self._queue.put(failure)

    def take_reply(self, message: Message) -> None:
        """Handle the reply. Output that was printed before it may still be on its way."""
        status = message.content.get("status")
        if status == "error":
            self._failure = messages.failure_of(message.content)
        elif status in ("abort", "aborted"):
            self._failure = messages.ABORTED
        # A busy machine may take long from the reply to the mark.
        if not self._mark:
            self._finish_later()

    def take_reply_to_mark(self) -> None:
        """Handle the reply to the request that prints the mark: little can be missing now."""
        self._finish_later()

    def _finish_later(self) -> None:
        if self.ended.is_set():
            return
        if self._late is not None:
            self._late.cancel()
        self._late = asyncio.get_running_loop().call_later(_LATE_SECONDS, self._finish_late)

    def _finish_late(self) -> None:
        # A full queue has stopped the kernel in the middle of its output.
        if self._queue.is_full:
            self._finish_later()
        else:
            self._finish()

    def _finish(self) -> None:
        if self._late is not None:
            self._late.cancel()
        if self._failure is not None and not self._has_failed:
            self._has_failed = True
            self._queue.put(self._failure)
        self.ended.set()


def _is_idle(message: Message) -> bool:
    return message.kind == "status" and message.content.get("execution_state") == "idle"


def _text(message: Message) -> str:
    return str(message.content.get("text", ""))
