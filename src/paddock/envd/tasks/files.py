"""Where tasks are kept: one directory each, with the record and the log.

A record is replaced whole or not at all. What cannot be read is set aside, never run again.
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
"""So much of a log is shown at either end."""
_NAME = re.compile(r"^[A-Za-z0-9]([-A-Za-z0-9_.]{0,251}[A-Za-z0-9])?$")


def is_name(name: str) -> bool:
    """Say whether a task can be called this: it becomes a directory."""
    return bool(_NAME.match(name))


class TaskFiles:
    """One directory of tasks."""

    def __init__(self, directory: str | Path) -> None:
        self.use_directory(directory)

    def use_directory(self, directory: str | Path) -> None:
        """Be about another directory."""
        self._root = Path(directory)
        self._path = str(directory)

    def directory(self, name: str) -> Path:
        """Give a task's own directory, made if need be."""
        path = self._root / name
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path

    def log_path(self, name: str) -> Path:
        """Give where a task's output is."""
        return self._root / name / "output.log"

    def save(self, record: TaskRecord) -> None:
        """Keep a record, whole or not at all."""
        path = self.directory(record.name)
        temporary = path / "task.json.new"
        temporary.write_bytes(msgspec.json.encode(record))
        os.replace(temporary, path / "task.json")

    def load(self) -> list[TaskRecord]:
        """Read every record; what makes no sense is set aside."""
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
                log.warning("a task cannot be read and is set aside: %s: %s", path.name, error)
                with contextlib.suppress(OSError):
                    file.rename(path / "task.json.unreadable")
        return [record for record in found if is_name(record.name)]

    def remove(self, name: str) -> None:
        """Forget a task and its log."""
        shutil.rmtree(self._root / name, ignore_errors=True)

    def output_ends(self, name: str) -> tuple[str, str]:
        """Give how a task's output begins and how it ends."""
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
