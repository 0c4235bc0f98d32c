"""The directory of tasks: one subdirectory each, with the record and the log.

A record is replaced atomically. An unreadable record is renamed and its task is not run again.
"""

import contextlib
import logging
import os
import re
import shutil
from pathlib import Path

import msgspec

from paddock.envd.tasks.model import TaskRecord

log = logging.getLogger(__name__)

OUTPUT_BYTES = 4096
"""The number of bytes shown from each end of a log."""
_NAME = re.compile(r"^[A-Za-z0-9]([-A-Za-z0-9_.]{0,251}[A-Za-z0-9])?$")


def is_name(name: str) -> bool:
    """Whether a task may have this name, which becomes a directory."""
    return bool(_NAME.match(name))


class TaskFiles:
    """Stores tasks in a directory."""

    def __init__(self, directory: str | Path) -> None:
        self.use_directory(directory)

    def use_directory(self, directory: str | Path) -> None:
        """Use another directory from now on."""
        self._root = Path(directory)
        self._path = str(directory)

    def directory(self, name: str) -> Path:
        """Return the directory of a task; create it if needed."""
        path = self._root / name
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path

    def log_path(self, name: str) -> Path:
        """Return the path of a task's output."""
        return self._root / name / "output.log"

    def save(self, record: TaskRecord) -> None:
        """Store a record atomically."""
        path = self.directory(record.name)
        temporary = path / "task.json.new"
        temporary.write_bytes(msgspec.json.encode(record))
        os.replace(temporary, path / "task.json")

    def load(self) -> list[TaskRecord]:
        """Return every record; rename unreadable ones."""
        try:
            names = sorted(os.listdir(self._path))
        except (FileNotFoundError, NotADirectoryError):
            return []
        found: list[TaskRecord] = []
        for path in map(self._root.joinpath, names):
            file = path / "task.json"
            try:
                found.append(msgspec.json.decode(file.read_bytes(), type=TaskRecord))
            except FileNotFoundError:
                continue
            except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
                log.warning(
                    "unreadable task record", extra={"task": path.name, "error": str(error)}
                )
                with contextlib.suppress(OSError):
                    file.rename(path / "task.json.unreadable")
        return [record for record in found if is_name(record.name)]

    def remove(self, name: str) -> None:
        """Delete a task and its log."""
        shutil.rmtree(self._root / name, ignore_errors=True)

    def output_ends(self, name: str) -> tuple[str, str]:
        """Return the first and the last bytes of a task's output."""
        try:
            with self.log_path(name).open("rb") as file:
                head = file.read(OUTPUT_BYTES)
                size = file.seek(0, os.SEEK_END)
                file.seek(max(size - OUTPUT_BYTES, 0))
                tail = file.read(OUTPUT_BYTES)
        except OSError:
            return "", ""
        if size <= OUTPUT_BYTES:
            tail = b""
        return head.decode(errors="replace"), tail.decode(errors="replace")
