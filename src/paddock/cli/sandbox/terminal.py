"""Connects the local terminal to a terminal in a sandbox."""

import base64
import contextlib
import os
import select
import signal
import sys
import termios
import threading
import tty
from collections.abc import Generator
from typing import Any

from paddock.cli.sandbox.envd_client import Shell, output_of
from paddock.kit.errors import InvalidError, PaddockError

_ENV = {"TERM": os.environ.get("TERM", "xterm-256color"), "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8"}


@contextlib.contextmanager
def _raw(descriptor: int) -> Generator[None]:
    before = termios.tcgetattr(descriptor)
    tty.setraw(descriptor)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _size() -> tuple[int, int]:
    size = os.get_terminal_size(sys.stdin.fileno())
    return size.columns, size.lines


class _Keyboard(threading.Thread):
    """Sends input until the remote shell ends."""

    def __init__(self, shell: Shell, pid: int, descriptor: int) -> None:
        super().__init__(daemon=True, name="keyboard")
        self._shell = shell
        self._selector = {"process": {"pid": pid}}
        self._descriptor = descriptor
        self._woken, self._wake = os.pipe()
        self.problem: PaddockError | None = None

    def run(self) -> None:
        """Read input and send it."""
        while True:
            ready, _, _ = select.select([self._descriptor, self._woken], [], [])
            if self._woken in ready:
                return
            data = os.read(self._descriptor, 4096)
            if not data:
                return
            try:
                self._send("SendInput", {"input": {"pty": base64.b64encode(data).decode()}})
            except PaddockError as error:
                self.problem = error
                return

    def resize(self, *_: object) -> None:
        """Send the size of the window."""
        columns, rows = _size()
        with contextlib.suppress(PaddockError):
            self._send("Update", {"pty": {"size": {"cols": columns, "rows": rows}}})

    def _send(self, method: str, body: dict[str, Any]) -> None:
        self._shell.call(method, {**self._selector, **body})

    def stop(self) -> None:
        """End the thread."""
        os.write(self._wake, b".")
        self.join(1)


def run_terminal(shell: Shell) -> int:
    """Connect this terminal to a shell in the sandbox; return its exit code."""
    descriptor = sys.stdin.fileno()
    if not os.isatty(descriptor):
        raise InvalidError(
            "standard input is not a terminal",
            hint="for scripts: paddock sandbox exec ID -- COMMAND",
        )
    keyboard: _Keyboard | None = None
    with _raw(descriptor):
        try:
            for event in shell.start("", env=_ENV, pty=_size()):
                if start := event.get("start"):
                    keyboard = _Keyboard(shell, int(start["pid"]), descriptor)
                    keyboard.start()
                    signal.signal(signal.SIGWINCH, keyboard.resize)
                out, _ = output_of(event)
                if out:
                    sys.stdout.buffer.write(out)
                    sys.stdout.buffer.flush()
                if end := event.get("end"):
                    return int(end.get("exitCode", 0))
        finally:
            signal.signal(signal.SIGWINCH, signal.SIG_DFL)
            if keyboard is not None:
                keyboard.stop()
    return 1
