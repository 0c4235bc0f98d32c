"""Turns COPY and ADD into steps of a build, each with the archive of its files."""

import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from paddock.cli.template.archives import (
    Archive,
    FileArchive,
    RepackedArchive,
    TextArchive,
    clean,
)
from paddock.cli.template.context import BuildContext, below_root, in_pattern, is_pattern
from paddock.cli.template.dockerfile.model import Copy, DockerfileError, PlainStep
from paddock.kit.errors import InvalidError

_ALL = "."
"""Source of a step that copies all of its archive into a directory."""

Fetch = Callable[[Copy, str], Path]
"""Returns a tar of a source that lies in a stage or an image, with names relative to its root."""


class SentStep(NamedTuple):
    """One step of a build, with its files."""

    type: str
    args: tuple[str, ...]
    line: int
    archive: Archive | None = None


def with_files(
    steps: Sequence[PlainStep | Copy], context: BuildContext, fetch: Fetch
) -> list[SentStep]:
    """Return the steps of a build."""
    found: list[SentStep] = []
    for step in steps:
        if isinstance(step, PlainStep):
            found.append(SentStep(step.type, step.args, step.line))
            continue
        try:
            found += (_step(step, *files) for files in _files(step, context, fetch))
        except DockerfileError:
            raise
        except InvalidError as error:
            raise DockerfileError(step.line, error.message, hint=error.hint) from error
    return found


def _step(copy: Copy, source: str, archive: Archive) -> SentStep:
    return SentStep("COPY", (source, copy.destination, copy.owner, copy.mode), copy.line, archive)


def _files(copy: Copy, context: BuildContext, fetch: Fetch) -> Iterator[tuple[str, Archive]]:
    """Yield the source and the archive of each step."""
    for file in copy.inline:
        yield file.name, TextArchive(file.name, file.content)
    for source in copy.sources:
        if copy.stage is not None or copy.image:
            yield _from_stage(source, fetch(copy, source))
        elif copy.unpacks:
            for name in context.names(source) or [source]:
                yield _unpacked(name, context)
        else:
            yield _from_context(source, context)


def _from_stage(source: str, path: Path) -> tuple[str, Archive]:
    name = below_root(source)
    if is_pattern(name):
        return _ALL, RepackedArchive(path, lambda item: _placed(name, item))
    return name, RepackedArchive(path, lambda item: _named(clean(item.name)))


def _placed(pattern: str, member: tarfile.TarInfo) -> str:
    name = clean(member.name)
    is_match = name.count("/") == pattern.count("/")
    return "" if is_match and member.isdir() else in_pattern(pattern, name)


def _unpacked(source: str, context: BuildContext) -> tuple[str, Archive]:
    found = context.find(source)
    path = found.entries[0].path
    if len(found.entries) == 1 and path.is_file() and tarfile.is_tarfile(path):
        return _ALL, RepackedArchive(path, lambda item: _named(clean(item.name)))
    return _from_context(source, context)


def _from_context(source: str, context: BuildContext) -> tuple[str, Archive]:
    found = context.find(source)
    if not is_pattern(found.name):
        return found.name, FileArchive(found.entries, _named)
    first = found.entries[0]
    if len(found.entries) == 1 and not first.path.is_dir():
        return first.name, FileArchive(found.entries, _named)
    directories = {entry.name for entry in found.entries if entry.path.is_dir()}
    depth = found.name.count("/")

    def place(name: str) -> str:
        is_match = name.count("/") == depth
        return "" if is_match and name in directories else in_pattern(found.name, name)

    return _ALL, FileArchive(found.entries, place)


def _named(name: str) -> str:
    """Return a name, or an empty string for the root, whose mode the destination keeps."""
    return "" if name == _ALL else name
