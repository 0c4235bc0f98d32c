"""The build context: a directory, without what .dockerignore excludes."""

import os
import posixpath
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from e2b_dockerfile_utils import PatternMatcher

from paddock.kit.errors import InvalidError

_WILDCARDS = frozenset("*?[")
_IGNORE_FILE = ".dockerignore"


class ContextFile(NamedTuple):
    """A file, link or directory of the context."""

    name: str
    """Path relative to the context."""
    path: Path


class Source(NamedTuple):
    """What one source of COPY stands for."""

    name: str
    """Path relative to the context, or a pattern."""
    entries: tuple[ContextFile, ...]


def is_pattern(source: str) -> bool:
    """Whether a source has wildcards."""
    return not _WILDCARDS.isdisjoint(source)


def below_root(source: str) -> str:
    """Return a source relative to the context, `.` for all of it; raise if it is outside."""
    name = posixpath.normpath(source.lstrip("/") or ".")
    if name == ".." or name.startswith("../"):
        raise InvalidError(f"{source!r} is outside the build context")
    return name


def in_pattern(pattern: str, name: str) -> str:
    """Return where a file below a match of a pattern is copied to, or an empty string for none.

    Directories that match are copied like a directory: their content, not they themselves.
    """
    depth = pattern.count("/") + 1
    parts = name.split("/")
    if len(parts) < depth or not _matches(pattern.split("/"), parts[:depth]):
        return ""
    return "/".join(parts[depth:]) or parts[-1]


class BuildContext:
    """Finds the files that COPY and ADD name."""

    def __init__(self, root: Path, dockerfile: Path | None = None) -> None:
        """Read the ignore file: that of the Dockerfile, or that of the context."""
        self._root = root.resolve()
        self._matcher = _read_ignore_file(self._root, dockerfile)

    def names(self, source: str) -> list[str]:
        """Return the paths that a source stands for: itself, or the matches of a pattern."""
        name = below_root(source)
        return self._match(name) if is_pattern(name) else [name]

    def find(self, source: str) -> Source:
        """Return the files of a source; raise if there are none."""
        name = below_root(source)
        names = self.names(source)
        entries = tuple(entry for root in names for entry in self._tree(root, name))
        if not entries:
            raise InvalidError(
                f"{source!r} is not in the build context {self._root}",
                hint=f"check the path, and {_IGNORE_FILE}, which may exclude it",
            )
        return Source(name, entries)

    def _tree(self, name: str, source: str) -> Iterator[ContextFile]:
        """Yield a file, or a directory with all below it. Links below it stay links."""
        path = (self._root / name).resolve()
        is_ignored = name != "." and self._matcher.matches(name)
        if not path.is_relative_to(self._root):
            if name == source:
                raise InvalidError(f"{name!r} is a link to {path}, outside the build context")
            path = self._root / name  # A match of a pattern stays a link.
            if not is_ignored and path.is_symlink():
                yield ContextFile(name, path)
            return
        if path.is_dir():
            if not is_ignored:
                yield ContextFile(name, path)
            if not is_ignored or self._matcher.may_match_under(name):
                yield from self._below(name, path)
        elif path.exists() and not is_ignored:
            yield ContextFile(name, path)

    def _below(self, name: str, path: Path) -> Iterator[ContextFile]:
        for found in sorted(os.scandir(path), key=lambda item: item.name):
            below = found.name if name == "." else f"{name}/{found.name}"
            is_ignored = self._matcher.matches(below)
            if not is_ignored:
                yield ContextFile(below, Path(found.path))
            if found.is_dir(follow_symlinks=False) and (
                not is_ignored or self._matcher.may_match_under(below)
            ):
                yield from self._below(below, Path(found.path))

    def _match(self, pattern: str) -> list[str]:
        """Return the paths that match a pattern; a wildcard matches within one name."""
        found = [""]
        for part in pattern.split("/"):
            found = [
                f"{parent}/{name}" if parent else name
                for parent in found
                for name in self._names(parent)
                if _matches([part], [name])
            ]
        return found

    def _names(self, parent: str) -> list[str]:
        directory = self._root / parent
        return sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []


def _matches(patterns: list[str], names: list[str]) -> bool:
    return all(
        fnmatchcase(name, pattern.replace("[^", "[!"))
        for name, pattern in zip(names, patterns, strict=True)
    )


def _read_ignore_file(root: Path, dockerfile: Path | None) -> PatternMatcher:
    candidates = [root / _IGNORE_FILE]
    if dockerfile is not None:
        candidates.insert(0, dockerfile.with_name(f"{dockerfile.name}{_IGNORE_FILE}"))
    for path in candidates:
        if path.is_file():
            lines = path.read_text(encoding="utf-8-sig").splitlines()
            try:
                return PatternMatcher(lines)
            except ValueError as error:
                raise InvalidError(f"{path}: {error}") from error
    return PatternMatcher([])
