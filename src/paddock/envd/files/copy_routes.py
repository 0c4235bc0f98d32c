"""The route `POST /files/copy`: copies files of an archive, as the steps COPY and ADD of builds do.

Query parameters: `source` (path in the archive), `path` (destination), `owner` (`user[:group]`),
`mode` (octal), `username` and `cwd`, which relative destinations and the default owner follow.
The body is the archive.
"""

import contextlib
import errno
import os
import posixpath
import re
import secrets
from typing import IO

import msgspec

from paddock.envd.blocking import in_thread
from paddock.envd.files.archive import ArchiveError, ArchiveLimits
from paddock.envd.files.copy_in import CopyOrder, copy_in
from paddock.envd.http.request import HttpError, HttpRequest
from paddock.envd.rpc.connect_frames import ConnectError, printable
from paddock.envd.sandbox_context import SandboxContext
from paddock.envd.users import is_id

_MAX_PACKED_BYTES = 8 << 30
_TEMPORARY = re.compile(r"\.copy-[0-9a-f]{16}")


class CopyRoutes:
    """Serves the copy route."""

    def __init__(self, context: SandboxContext, limits: ArchiveLimits | None = None) -> None:
        self._context = context
        self._limits = limits or ArchiveLimits()

    async def serve(self, request: HttpRequest) -> None:
        """Copy the files and respond with their number, or with the reason for a failure."""
        try:
            order = self._order(request.query)
            with _unnamed_file() as file:
                await _receive(request, file)
                count = await in_thread(copy_in, file, order, self._limits)
        except (ArchiveError, ConnectError, HttpError, OSError) as error:
            message = printable(getattr(error, "message", "") or str(error))
            body = msgspec.json.encode({"code": 400, "message": message})
            request.keep_alive = request.keep_alive and request.body.is_complete
            request.respond(400, body, headers=[("Content-Type", "application/json")])
            return
        body = msgspec.json.encode({"entries": count})
        request.respond(200, body, headers=[("Content-Type", "application/json")])

    def _order(self, query: dict[str, str]) -> CopyOrder:
        user = self._context.user(query.get("username"))
        uid, gid = self._owner(query.get("owner", ""), (user.uid, user.gid))
        base = query.get("cwd") or user.home
        wanted = query.get("path", "")
        if "\0" in wanted:
            raise HttpError(400, "a path cannot contain NUL bytes")
        path = self._context.resolve(posixpath.join(base, wanted), user)
        mode = query.get("mode", "")
        if mode and (len(mode) > 5 or set(mode) - set("01234567")):
            raise HttpError(400, f"invalid mode {mode!r}: use octal digits, such as 0755")
        return CopyOrder(
            source=query.get("source", ""),
            destination=path + "/" if wanted.endswith("/") or not wanted else path,
            uid=uid,
            gid=gid,
            mode=int(mode, 8) & 0o7777 if mode else None,
        )

    def _owner(self, text: str, default: tuple[int, int]) -> tuple[int, int]:
        if not text:
            return default
        name, _, group = text.partition(":")
        user = self._context.user(name)
        if not group or group == name:
            return user.uid, user.gid
        gid = int(group) if is_id(group) else self._context.users.group_id(group)
        if gid is None:
            raise HttpError(400, f"invalid owner {text!r}: group {group!r} not found")
        return user.uid, gid


def _unnamed_file(directory: str = "/") -> IO[bytes]:
    """Open a temporary file of the sandbox that has no name, or none for longer than a moment."""
    try:
        flags = os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC
        return os.fdopen(os.open(directory, flags, 0o600), "w+b")
    except OSError as error:
        # Overlays of older kernels.
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    return _short_named_file(directory)


def _short_named_file(directory: str) -> IO[bytes]:
    """Open a file and remove its name; also names that an envd has left when it was killed."""
    for name in os.listdir(directory):
        if _TEMPORARY.fullmatch(name):
            with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                os.unlink(os.path.join(directory, name))
    path = os.path.join(directory, f".copy-{secrets.token_hex(8)}")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.fdopen(os.open(path, flags, 0o600), "w+b")
    with contextlib.suppress(FileNotFoundError):  # another request has removed it as a left one
        os.unlink(path)
    return file


async def _receive(request: HttpRequest, file: IO[bytes]) -> None:
    size = 0
    async for piece in request.body:
        size += len(piece)
        if size > _MAX_PACKED_BYTES:
            raise HttpError(413, f"the archive has more than {_MAX_PACKED_BYTES:,} bytes")
        await in_thread(file.write, piece)
    file.seek(0)
