"""Files of the code interpreter on this machine: its server, lock files, and optionally wheels."""

import importlib.util
import sys
from pathlib import Path
from typing import NamedTuple

from paddock.cli.template.archives import FileArchive
from paddock.cli.template.context import ContextFile
from paddock.kit.errors import InvalidError, NotFoundError

PACKAGE = "code_interpreter"
LOCKS = ("interpreter-python.txt", "interpreter-server.txt")
"""What is installed for code that runs, and for the server."""
_WHEEL_SUFFIXES = (".whl", ".tar.gz", ".zip")


class Assets(NamedTuple):
    """What is copied into the template."""

    code: FileArchive
    locks: FileArchive
    wheels: FileArchive | None = None
    """Packages of the lock files; None: they are downloaded in the build."""


def find(wheels: Path | None = None) -> Assets:
    """Return the files of this installation; `NotFoundError` if it has none."""
    package = _package()
    places = (
        package.parents[1] / "requirements",
        Path(sys.prefix) / "share" / "paddock" / "requirements",
    )
    directory = next(
        (path for path in places if all((path / name).is_file() for name in LOCKS)), None
    )
    if directory is None:
        raise NotFoundError(
            f"the lock files of the code interpreter ({', '.join(LOCKS)}) are not installed",
            hint=f"they belong into {places[0]}",
        )
    return Assets(
        code=_archive(_modules(package)),
        locks=_archive([ContextFile(name, directory / name) for name in LOCKS]),
        wheels=None if wheels is None else _archive(_wheels(wheels)),
    )


def _package() -> Path:
    """Return the directory of the package. It is not imported: it is for another Python."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise NotFoundError(
            "the code interpreter is not part of this installation of Paddock",
            hint=f"install Paddock with its package {PACKAGE}",
        )
    return Path(found.origin).parent


def _modules(package: Path) -> list[ContextFile]:
    below = (path for path in package.rglob("*") if "__pycache__" not in path.parts)
    return [
        ContextFile(str(path.relative_to(package.parent)), path)
        for path in sorted((package, *below))
    ]


def _wheels(directory: Path) -> list[ContextFile]:
    found = sorted(path for path in directory.glob("*") if path.name.endswith(_WHEEL_SUFFIXES))
    if not found:
        raise InvalidError(
            f"{directory} has no packages",
            hint=f"`pip download --require-hashes -r LOCK -d {directory}` gets them, for each lock "
            "file; they must fit Python 3.11 of Debian 12",
        )
    return [ContextFile(path.name, path) for path in found]


def _archive(entries: list[ContextFile]) -> FileArchive:
    return FileArchive(entries, lambda name: name)
