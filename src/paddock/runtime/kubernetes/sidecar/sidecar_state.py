"""State of the sidecar that survives its restarts, in a file on an in-memory volume of the pod.

The file is opened before the sidecar enters the main container.
"""

import os
from pathlib import Path

import msgspec
from msgspec import Struct

from paddock.envd.config import EnvdSettings


class _Kept(Struct, frozen=True):
    main: str
    settings: EnvdSettings


class SidecarState:
    """The state file; read at start, rewritten on every change."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._file = os.open(directory / "settings.json", flags, 0o600)
        self.main = ""
        """Id of the main container whose start command was run last."""
        self.settings: EnvdSettings | None = None
        """Settings of envd; `None` before the first start."""
        if data := os.pread(self._file, 1 << 20, 0):
            kept = msgspec.json.decode(data, type=_Kept)
            self.main, self.settings = kept.main, kept.settings

    def write(self, main: str, settings: EnvdSettings) -> None:
        self.main, self.settings = main, settings
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, msgspec.json.encode(_Kept(main, settings)), 0)
