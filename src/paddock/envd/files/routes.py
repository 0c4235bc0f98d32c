"""The routes `/files` (downloads and uploads over plain HTTP) and `/files/compose`.

Decides authorization (token or signature), path and status code. Files are sent by `downloads.py`;
uploads are read by `upload_body.py`.
"""

import errno
import os
import posixpath
import secrets
import time
from collections.abc import Awaitable, Mapping

import msgspec
from msgspec import Struct

from paddock.envd.blocking import in_thread
from paddock.envd.files import downloads, paths, signature, upload_body
from paddock.envd.files.upload_body import WrittenFile
from paddock.envd.files.uploads import NoSpaceError
from paddock.envd.http.request import BodyTooLargeError, HttpError, HttpRequest
from paddock.envd.rpc.connect_frames import ConnectError, printable
from paddock.envd.sandbox_context import SandboxContext
from paddock.envd.users import User

_ERRNO_STATUS = {
    errno.ENOENT: 404,
    errno.ENOTDIR: 404,
    errno.ENAMETOOLONG: 400,
    errno.ELOOP: 400,
    errno.EACCES: 403,
    errno.EPERM: 403,
    errno.EROFS: 403,
    errno.ENOSPC: 507,
    errno.EDQUOT: 507,
}
_ERROR_STATUS: Mapping[type[Exception], int] = {
    paths.NotRegularError: 400,
    paths.ParentError: 400,
    NoSpaceError: 507,
}


class ComposeRequest(Struct, frozen=True):
    """Body of `POST /files/compose`."""

    source_paths: tuple[str, ...]
    destination: str
    username: str = ""


class FileRoutes:
    """Serves the file routes."""

    def __init__(self, context: SandboxContext) -> None:
        self._context = context

    async def serve(self, request: HttpRequest, *, is_trusted: bool) -> None:
        """Serve `/files`."""
        if request.method not in ("GET", "HEAD", "POST"):
            request.respond(405, headers=[("Allow", "GET, HEAD, POST")])
            return
        await self._respond_errors(request, self._serve(request, is_trusted=is_trusted))

    async def _serve(self, request: HttpRequest, *, is_trusted: bool) -> None:
        is_write = request.method == "POST"
        if not is_trusted:
            self._authorize(request, "write" if is_write else "read")
        user = self._context.user(request.query.get("username"))
        if is_write:
            written = await upload_body.receive(request, self._context, user)
            body = msgspec.json.encode(written)
            request.respond(200, body, headers=[("Content-Type", "application/json")])
        else:
            path = self._context.resolve(request.query.get("path", ""), user)
            await downloads.send(request, path)

    async def compose(self, request: HttpRequest) -> None:
        """Concatenate files into one."""
        await self._respond_errors(request, self._compose(request))

    async def _respond_errors(self, request: HttpRequest, work: Awaitable[None]) -> None:
        """Send errors as a response, or reset the connection if a response has begun."""
        try:
            await work
        except (HttpError, ConnectError, OSError, *_ERROR_STATUS) as error:
            if request.is_started:
                request.abort()
                return
            status, message = _explain(error)
            body = msgspec.json.encode({"code": status, "message": printable(message)})
            # The rest of an upload that is refused is not read.
            request.keep_alive = request.keep_alive and request.body.is_complete
            request.respond(status, body, headers=[("Content-Type", "application/json")])

    # -- access

    def _authorize(self, request: HttpRequest, operation: signature.Operation) -> None:
        token = self._context.settings.access_token
        if token is None:
            return
        given = request.headers.get("x-access-token")
        if given is not None:
            if not signature.is_token(given, token):
                raise HttpError(401, "invalid access token")
            return
        query = request.query
        if "signature" not in query:
            raise HttpError(
                401, "missing signature: sign the URL or send the X-Access-Token header"
            )
        try:
            signature.verify(
                signature=query["signature"],
                path=query.get("path", ""),
                operation=operation,
                username=query.get("username", ""),
                token=token,
                expiration=query.get("signature_expiration"),
                now=time.time(),
            )
        except signature.BadSignatureError as error:
            raise HttpError(401, str(error)) from error

    async def _compose(self, request: HttpRequest) -> None:
        try:
            body = await request.body.read(1 << 20)
            wanted = msgspec.json.decode(body, type=ComposeRequest)
        except (msgspec.MsgspecError, BodyTooLargeError, RecursionError) as error:
            raise HttpError(400, f"cannot read the request: {error}") from error
        if not wanted.source_paths or not wanted.destination:
            raise HttpError(400, "source_paths and destination are required")
        user = self._context.user(wanted.username or None)
        sources = [self._context.resolve(path, user) for path in wanted.source_paths]
        destination = self._context.resolve(wanted.destination, user)
        await in_thread(_concatenate, sources, destination, user)
        response = WrittenFile(
            name=printable(posixpath.basename(destination)),
            path=printable(destination),
            type="file",
        )
        request.respond(
            200, msgspec.json.encode(response), headers=[("Content-Type", "application/json")]
        )


def _explain(error: Exception) -> tuple[int, str]:
    if isinstance(error, HttpError):
        return error.status, str(error)
    if isinstance(error, ConnectError):
        return (401 if error.code == "unauthenticated" else 400), error.message
    if not isinstance(error, OSError):
        return _ERROR_STATUS[type(error)], str(error)
    status = _ERRNO_STATUS.get(error.errno or 0, 500)
    where = f" {os.fsdecode(error.filename)!r}" if isinstance(error.filename, str | bytes) else ""
    return status, f"cannot access{where}: {error.strerror}"


def _concatenate(sources: list[str], destination: str, user: User) -> None:
    """Write to a temporary file and rename it, so that a source may be the destination."""
    paths.make_parents(destination, uid=user.uid, gid=user.gid)
    draft = f"{destination}.{secrets.token_hex(6)}.part"
    out = paths.open_regular(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        os.fchown(out, user.uid, user.gid)
        for source in sources:
            fd = paths.open_regular(source, os.O_RDONLY)
            try:
                while os.sendfile(out, fd, None, 1 << 24):
                    pass
            finally:
                os.close(fd)
        os.rename(draft, destination)
    except BaseException:
        os.unlink(draft)
        raise
    finally:
        os.close(out)
