"""`COPY` of template builds: files of an archive, merged into the sandbox.

As a Dockerfile's: a file or link goes to the destination, or into it if that ends in `/` or is a
directory; the content of a directory is merged into the destination. A link at the place of a file
is replaced, a link to a directory is followed, a directory that exists keeps its metadata. All of
it happens in the namespaces of the sandbox.
"""

import errno
import os
import posixpath
import stat
from typing import IO

from msgspec import Struct

from paddock.envd.files.archive import ArchiveError, ArchiveLimits, ArchiveMember, members
from paddock.envd.files.paths import make_directories
from paddock.wire.bounded_tar import DAMAGE

_CHUNK = 1 << 20


class CopyOrder(Struct, frozen=True):
    """What to copy, and how."""

    source: str
    """Path below the archive. The part from the first wildcard on is ignored."""
    destination: str
    """Absolute path; one that ends in `/` is a directory."""
    uid: int
    gid: int
    mode: int | None = None
    """Mode of files and directories; `None`: as in the archive."""


def copy_in(file: IO[bytes], order: CopyOrder, limits: ArchiveLimits) -> int:
    """Copy what the order names and return the number of entries; `ArchiveError` if none."""
    copier = _Copier(order)
    try:
        for member in members(file, limits):
            copier.add(member)
        copier.finish()
    except DAMAGE as error:  # in the content of a member, or in its metadata
        raise ArchiveError(f"the archive cannot be copied: {error}") from error
    if not copier.count:
        raise ArchiveError(f"no file of the archive matches {order.source!r}")
    return copier.count


def source_prefix(source: str) -> tuple[str, ...]:
    """Return the components of a source before the first one with a wildcard."""
    parts: list[str] = []
    for part in source.split("/"):
        if any(sign in part for sign in "*?["):
            break
        if part not in ("", "."):
            parts.append(part)
    if ".." in parts:
        raise ArchiveError(f"the source {source!r} leads out of the archive")
    return tuple(parts)


class _Copier:
    def __init__(self, order: CopyOrder) -> None:
        self._order = order
        self._prefix = source_prefix(order.source)
        self._placed: dict[tuple[str, ...], str] = {}
        """Where each file of the archive was written, for hard links."""
        self._times: dict[str, float] = {}
        self.count = 0

    def add(self, member: ArchiveMember) -> None:
        """Write one member, unless the source does not include it."""
        if member.path[: len(self._prefix)] != self._prefix:
            return
        target = self._target(member)
        self.count += 1
        try:
            self._write(member, target)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            name = "/".join(member.path)
            raise ArchiveError(f"cannot copy {name!r} to {target!r}: {error.strerror}") from error

    def finish(self) -> None:
        """Set the times of new directories, which copying has changed."""
        for path, when in self._times.items():
            os.utime(path, (when, when), follow_symlinks=False)

    def _target(self, member: ArchiveMember) -> str:
        below = member.path[len(self._prefix) :]
        destination = self._order.destination
        if below:
            return posixpath.join(destination, *below)
        if stat.S_ISDIR(member.kind):
            return posixpath.join(destination, "")[:-1] or "/"
        is_into = destination.endswith("/") or os.path.isdir(destination)
        return posixpath.join(destination, member.path[-1]) if is_into else destination

    def _write(self, member: ArchiveMember, target: str) -> None:
        make_directories(posixpath.dirname(target), uid=self._order.uid, gid=self._order.gid)
        if stat.S_ISDIR(member.kind):
            self._directory(member, target)
        elif stat.S_ISLNK(member.kind):
            _remove_file(target)
            os.symlink(member.link, target)
            os.chown(target, self._order.uid, self._order.gid, follow_symlinks=False)
        elif member.content is None:
            self._hard_link(member, target)
        else:
            self._file(member, member.content, target)

    def _directory(self, member: ArchiveMember, target: str) -> None:
        if os.path.isdir(target):
            return
        _remove_file(target)
        os.mkdir(target, 0o700)
        os.chown(target, self._order.uid, self._order.gid, follow_symlinks=False)
        os.chmod(target, self._mode(member))
        self._times[target] = member.mtime

    def _file(self, member: ArchiveMember, content: IO[bytes], target: str) -> None:
        _remove_file(target)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(target, flags, 0o600), "wb") as out:
            while piece := content.read(_CHUNK):
                out.write(piece)
            out.flush()
            os.fchown(out.fileno(), self._order.uid, self._order.gid)
            os.fchmod(out.fileno(), self._mode(member))
            os.utime(out.fileno(), (member.mtime, member.mtime))
        self._placed[member.path] = target

    def _hard_link(self, member: ArchiveMember, target: str) -> None:
        source = self._placed.get(member.same_as)
        name, other = "/".join(member.path), "/".join(member.same_as)
        if source is None:
            raise ArchiveError(
                f"the archive contains {name!r}, a hard link to {other!r}, which is not copied"
            )
        if source == target:
            return
        _remove_file(target)
        os.link(source, target, follow_symlinks=False)
        self._placed[member.path] = target

    def _mode(self, member: ArchiveMember) -> int:
        return member.mode if self._order.mode is None else self._order.mode


def _remove_file(path: str) -> None:
    """Remove what is at the place of a file or link; a directory is an error."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
