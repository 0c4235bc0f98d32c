"""Copies the output of containers from the CRI log format into a task's log.

A CRI runtime writes `time stream tag text` for every line; the tag `P` marks a partial line. The
text is copied, and the offsets in both files are saved: after a restart output is neither lost nor
repeated.
"""

import contextlib
import os
from pathlib import Path

import msgspec
from msgspec import Struct

_CHUNK_BYTES = 1 << 20
_FIELDS = 4


class _Offsets(Struct, frozen=True):
    """The offsets in both files up to which output is copied."""

    read: int = 0
    written: int = 0


class ContainerLog:
    """Copies the output of one container."""

    def __init__(self, log_path: Path, name: str) -> None:
        self._log_path = log_path
        self.source = log_path.with_name(f"{name}.cri.log")
        """The file that the runtime writes."""
        self._mark_path = log_path.with_name(f"{name}.cri.mark")

    def reset(self) -> None:
        """Prepare for a new container; append to the output of earlier attempts."""
        self.source.unlink(missing_ok=True)
        size = self._log_path.stat().st_size if self._log_path.exists() else 0
        self._write_mark(_Offsets(0, size))

    def copy_new(self) -> bool:
        """Copy new output; return whether there was any."""
        has_copied = False
        with contextlib.suppress(FileNotFoundError), self.source.open("rb") as source:
            while self._copy(source.fileno()):
                has_copied = True
        return has_copied

    def _copy(self, source: int) -> bool:
        mark = self._read_mark()
        data = os.pread(source, _CHUNK_BYTES, mark.read)
        # The runtime may be in the middle of a line, which is left for the next call.
        whole = data[: data.rfind(b"\n") + 1]
        if not whole:
            return False
        text = b"".join(_text(line) for line in whole[:-1].split(b"\n"))
        descriptor = os.open(self._log_path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # After a crash between this write and the next one, the text is overwritten.
            os.pwrite(descriptor, text, mark.written)
        finally:
            os.close(descriptor)
        self._write_mark(_Offsets(mark.read + len(whole), mark.written + len(text)))
        return True

    def _read_mark(self) -> _Offsets:
        try:
            return msgspec.json.decode(self._mark_path.read_bytes(), type=_Offsets)
        except (FileNotFoundError, msgspec.DecodeError):
            return _Offsets()

    def _write_mark(self, mark: _Offsets) -> None:
        temporary = self._mark_path.with_suffix(".new")
        temporary.write_bytes(msgspec.json.encode(mark))
        os.replace(temporary, self._mark_path)


def _text(line: bytes) -> bytes:
    """Return the text of one line of the runtime's log."""
    parts = line.split(b" ", _FIELDS - 1)
    if len(parts) < _FIELDS:
        return line + b"\n"
    return parts[-1] if parts[2].startswith(b"P") else parts[-1] + b"\n"
