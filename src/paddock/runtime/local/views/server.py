"""The process that writes the files of views when they are read (`native/views/views.c`).

Only the kernel and the files connect it with sandboxes. When it exits, it writes all files once
more; reads continue with these contents until it is started again.
"""

import logging
import subprocess
from collections.abc import Sequence
from pathlib import Path

from paddock.kit.errors import UnavailableError
from paddock.kit.logs import fields
from paddock.runtime.local.launch import native_build

log = logging.getLogger(__name__)

_READY = b"ready\n"
_EXIT_SECONDS = 5.0
"""Time to write the files of all sandboxes once more."""


class ViewServer:
    """Starts the view server, and starts it again after an exit."""

    def __init__(self, cache: Path, arguments: Sequence[str]) -> None:
        self._cache = cache
        self._arguments = tuple(arguments)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The pid of the server, or `None` if it does not run."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def start(self) -> None:
        """Start it. Raises `UnavailableError` where the kernel cannot hold reads."""
        program = native_build.ensure_views(self._cache)
        process = subprocess.Popen(
            [program, *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        output = process.stdout
        line = output.readline() if output is not None else b""
        if output is not None:
            output.close()
        if line != _READY:
            process.kill()
            process.wait()
            self._close(process)
            reason = line.decode(errors="replace").strip() or f"status {process.returncode}"
            raise UnavailableError(f"the view server cannot run: {reason}")
        self._process = process

    def restart_if_ended(self) -> None:
        """Start it again if it has exited. Raises `UnavailableError` on failure; call it again."""
        if self.pid is not None:
            return
        if self._process is not None:
            log.warning("view server exited", extra=fields(status=self._process.returncode))
            self._close(self._process)
        self.start()

    def stop(self) -> None:
        """Stop it; views keep their last contents."""
        if (process := self._process) is not None:
            self._close(process)  # it exits when its input ends
            try:
                process.wait(_EXIT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _close(self, process: subprocess.Popen[bytes]) -> None:
        if process.stdin is not None:
            process.stdin.close()
        self._process = None
