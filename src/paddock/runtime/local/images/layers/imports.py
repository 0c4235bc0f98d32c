"""The layers that running imports need, also those of other processes.

    <directory>/<id>   ids of the layers; locked by the import until it ends

Layers of an image are unused until all of it is there, which may take as long as a pull. So a
collection of unused layers need not wait for imports, and imports need not wait for each other.
"""

import contextlib
import fcntl
import uuid
from collections.abc import Collection, Iterable
from pathlib import Path


class RunningImports:
    """A directory with one file for each import. Its caller holds the lock of the store."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)

    def begin(self, layers: Iterable[str]) -> "RunningImport":
        """Record an import of these layers."""
        return RunningImport(self._directory / uuid.uuid4().hex, layers)

    def needed(self, layers: Collection[str], temporary: str) -> frozenset[str]:
        """Return those of the layers, or beginnings of layers, that a running import needs.

        `temporary` is what names of beginnings start with, before the id of their import.
        """
        found: set[str] = set()
        running: list[str] = []
        for path in self._directory.iterdir():
            if (named := _layers_of(path)) is not None:
                found |= named
                running.append(f"{temporary}{path.name}")
        prefixes = tuple(running)
        return frozenset(one for one in layers if one in found or one.startswith(prefixes))


class RunningImport:
    """One import."""

    def __init__(self, path: Path, layers: Iterable[str]) -> None:
        self.id = path.name
        self._path = path
        self._file = path.open("x")
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._file.write("\n".join(layers))
        self._file.flush()

    def end(self) -> None:
        """Need the layers no more."""
        self._path.unlink(missing_ok=True)
        self._file.close()


def _layers_of(path: Path) -> set[str] | None:
    """Return the layers of a running import; `None` if its process has ended, and remove it."""
    with contextlib.suppress(FileNotFoundError), path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return set(file.read().split())
        path.unlink(missing_ok=True)
    return None
