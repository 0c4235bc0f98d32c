"""What containers say: from the runtime's log format into a task's own log.

A CRI runtime writes `time stream tag text` for every line, where the tag `P` is for a line that
goes on. A transcript copies the bare text on, as far as it has come, and remembers how far that
was: whoever takes over after a restart neither loses nor repeats anything.
"""

import contextlib
import os
from pathlib import Path

import msgspec
from msgspec import Struct

_CHUNK_BYTES = 1 << 20
_PARTS = 4


class _Offsets(Struct, frozen=True):
    """How far a transcript has come, in both files."""

    read: int = 0
    written: int = 0


class ContainerLog:
    """The copy of one container's output."""

    def __init__(self, log_path: Path, name: str) -> None:
        self._log_path = log_path
        self.source = log_path.with_name(f"{name}.cri.log")
        """Where the runtime writes."""
        self._mark_path = log_path.with_name(f"{name}.cri.mark")

    def reset(self) -> None:
        """Make ready for a new container, after what earlier attempts have said."""
        self.source.unlink(missing_ok=True)
        size = self._log_path.stat().st_size if self._log_path.exists() else 0
        self._write_mark(_Offsets(0, size))

    def copy_new(self) -> bool:
        """Copy what has been said since; says whether that was anything."""
        has_said = False
        with contextlib.suppress(FileNotFoundError), self.source.open("rb") as source:
            while self._copy(source.fileno()):
                has_said = True
        return has_said

    def _copy(self, source: int) -> bool:
        mark = self._read_mark()
        data = os.pread(source, _CHUNK_BYTES, mark.read)
        # The runtime may be in the middle of a line; that is for the next time.
        whole = data[: data.rfind(b"\n") + 1]
        if not whole:
            return False
        text = b"".join(_text(line) for line in whole[:-1].split(b"\n"))
        descriptor = os.open(self._log_path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # Written and not noted before a crash: it is written over.
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
    """Give what was said in one line of the runtime's log."""
    parts = line.split(b" ", _PARTS - 1)
    if len(parts) < _PARTS:
        return line + b"\n"
    return parts[-1] if parts[2].startswith(b"P") else parts[-1] + b"\n"
