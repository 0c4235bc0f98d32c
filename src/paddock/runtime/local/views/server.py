"""The process that writes the files of views when they are read (`native/views/views.c`).

Only the kernel and the files connect it with sandboxes. When it exits, reads continue with the last
contents until it is started again.
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


class ViewServer:
    """Starts the view server, and starts it again after an exit."""

    def __init__(self, cache: Path, arguments: Sequence[str]) -> None:
        self._cache = cache
        self._arguments = tuple(arguments)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The pid of the server, or `None` if it does not run."""
        return self._process.pid if self._process is not None else None

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
            reason = line.decode(errors="replace").strip() or f"status {process.returncode}"
            raise UnavailableError(f"the view server cannot run: {reason}")
        self._process = process

    def restart_if_ended(self) -> None:
        """Start it again if it has exited."""
        if self._process is None or self._process.poll() is None:
            return
        log.warning("view server exited", extra=fields(status=self._process.returncode))
        self._close()
        self.start()

    def stop(self) -> None:
        """Stop it; views keep their last contents."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._close()

    def _close(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        self._process = None
