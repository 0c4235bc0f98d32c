"""`/files`: downloads and uploads over plain HTTP, and `/files/compose`.

Who may (token or signature), which file, which representation (range, gzip, not modified), which
status code. Bytes are written by `uploads`, multipart is read by `multipart`, the notations
of HTTP headers are `headers`'.
"""

import asyncio
import errno
import os
import posixpath
import secrets
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Mapping

import msgspec
from msgspec import Struct

from paddock.envd import headers, paths, signature
from paddock.envd.blocking import in_thread
from paddock.envd.connect_wire import ConnectError, printable
from paddock.envd.environment import Environment
from paddock.envd.exchange import BodyTooLargeError, Exchange
from paddock.envd.multipart import (
    Data,
    MultipartError,
    MultipartParser,
    Part,
    parameters,
)
from paddock.envd.uploads import BadGzipError, Inflater, NoSpaceError, Upload, require_space
from paddock.envd.users import User

_CHUNK = 256 << 10
_SAMPLE = 64 << 10
_MAX_UNSIZED = 4 << 20
UPLOAD_PATIENCE = 600.0
"""How many seconds an upload may stand still, as clients set it no limit of their own."""
_MAX_METADATA_KEY = 246
_MAX_METADATA = 4096
_METADATA_HEADER = "x-metadata-"
_STATUS = {
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
_NAMED: Mapping[type[Exception], int] = {
    paths.NotRegularError: 400,
    paths.ParentError: 400,
    NoSpaceError: 507,
}


class RefusedError(Exception):
    """An answer other than success, for the client to read."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Written(Struct, frozen=True, omit_defaults=True):
    """One uploaded file, as told to the client."""

    name: str
    path: str
    metadata: Mapping[str, str] = {}
    type: str = ""


class ComposeRequest(Struct, frozen=True):
    """Body of `POST /files/compose`."""

    source_paths: tuple[str, ...]
    destination: str
    username: str = ""


class Files:
    """The file routes."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    async def serve(self, exchange: Exchange, *, is_trusted: bool) -> None:
        """Answer `/files`."""
        if exchange.method not in ("GET", "HEAD", "POST"):
            exchange.respond(405, headers=[("Allow", "GET, HEAD, POST")])
            return
        await self._answered(exchange, self._serve(exchange, is_trusted=is_trusted))

    async def _serve(self, exchange: Exchange, *, is_trusted: bool) -> None:
        is_write = exchange.method == "POST"
        if not is_trusted:
            self._authorise(exchange, "write" if is_write else "read")
        user = self._environment.user(exchange.query.get("username"))
        if is_write:
            await self._upload(exchange, user)
        else:
            await self._download(exchange, user)

    async def compose(self, exchange: Exchange) -> None:
        """Concatenate files into one."""
        await self._answered(exchange, self._compose(exchange))

    async def _answered(self, exchange: Exchange, work: Awaitable[None]) -> None:
        """Turn what goes wrong into an answer, or cut the connection if one has begun."""
        try:
            await work
        except (RefusedError, ConnectError, OSError, *_NAMED) as error:
            if exchange.is_started:
                exchange.abort()
                return
            status, message = _explain(error)
            body = msgspec.json.encode({"code": status, "message": printable(message)})
            # An upload refused half-way: what is left of it is not read.
            exchange.keep_alive = exchange.keep_alive and exchange.body.is_complete
            exchange.respond(status, body, headers=[("Content-Type", "application/json")])

    # -- access

    def _authorise(self, exchange: Exchange, operation: signature.Operation) -> None:
        token = self._environment.settings.access_token
        if token is None:
            return
        given = exchange.headers.get("x-access-token")
        if given is not None:
            if not signature.is_token(given, token):
                raise RefusedError(401, "invalid access token")
            return
        query = exchange.query
        if "signature" not in query:
            raise RefusedError(
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
            raise RefusedError(401, str(error)) from error

    # -- reading

    async def _download(self, exchange: Exchange, user: User) -> None:
        path = self._environment.resolve(exchange.query.get("path", ""), user)
        fd = paths.open_regular(path, os.O_RDONLY)
        with os.fdopen(fd, "rb", buffering=0) as file:
            info = os.fstat(fd)
            name = posixpath.basename(path)
            common = [
                ("Content-Type", headers.content_type(name, os.pread(fd, 512, 0))),
                ("Content-Disposition", headers.disposition(name)),
                ("Last-Modified", headers.format_date(info.st_mtime)),
                ("Vary", "Accept-Encoding"),
            ]
            if self._is_settled(exchange, int(info.st_mtime), common):
                return
            span = self._span(exchange, info)
            encoding = headers.choose_encoding(exchange.headers.get("accept-encoding"))
            if encoding is None:
                raise RefusedError(406, "no acceptable encoding: gzip and identity are offered")
            if not info.st_size and (content := _unsized(fd)):
                exchange.respond(200, content, headers=common)
                return
            if encoding == "gzip" and span is None and exchange.method == "GET" and _shrinks(fd):
                await _send_gzip(exchange, fd, common)
                return
            offset, length = span or (0, info.st_size)
            common.append(("Accept-Ranges", "bytes"))
            if span is not None:
                last = offset + length - 1
                common.append(("Content-Range", f"bytes {offset}-{last}/{info.st_size}"))
            exchange.start(206 if span is not None else 200, common, length=length)
            await exchange.send_file(file, offset, length)

    def _is_settled(self, exchange: Exchange, modified: int, common: list[tuple[str, str]]) -> bool:
        """Answer a conditional request whose condition says that no body is wanted."""
        unless = headers.parse_date(exchange.headers.get("if-unmodified-since"))
        if unless is not None and modified > unless:
            raise RefusedError(412, "the file was modified since")
        since = headers.parse_date(exchange.headers.get("if-modified-since"))
        if since is not None and modified <= since and "if-none-match" not in exchange.headers:
            exchange.respond(304, headers=common[2:])
            return True
        return False

    def _span(self, exchange: Exchange, info: os.stat_result) -> tuple[int, int] | None:
        condition = exchange.headers.get("if-range")
        if condition is not None and headers.parse_date(condition) != int(info.st_mtime):
            return None
        try:
            return headers.parse_range(exchange.headers.get("range"), info.st_size)
        except headers.UnsatisfiableRangeError:
            exchange.response_headers.append(("Content-Range", f"bytes */{info.st_size}"))
            raise RefusedError(416, "the range lies outside the file") from None

    # -- writing

    async def _upload(self, exchange: Exchange, user: User) -> None:
        metadata = _read_metadata(exchange.headers)
        kind, _, rest = exchange.headers.get("content-type", "").partition(";")
        kind = kind.strip().lower()
        if kind == "multipart/form-data":
            boundary = parameters(";" + rest).get("boundary", "")
            written = await self._upload_parts(exchange, user, metadata, boundary)
        elif kind == "application/octet-stream":
            written = [await self._upload_raw(exchange, user, metadata)]
        else:
            raise RefusedError(
                400,
                f"unsupported content type {kind!r}: "
                "send multipart/form-data or application/octet-stream",
            )
        exchange.respond(
            200, msgspec.json.encode(written), headers=[("Content-Type", "application/json")]
        )

    async def _upload_raw(
        self, exchange: Exchange, user: User, metadata: Mapping[str, str]
    ) -> Written:
        if not exchange.query.get("path"):
            raise RefusedError(400, "the path parameter is required for application/octet-stream")
        path = self._environment.resolve(exchange.query["path"], user)
        length = exchange.headers.get("content-length", "")
        if length.isdigit():
            require_space(path, int(length))
        upload = Upload(path, user, metadata)
        try:
            async for piece in _decoded(exchange):
                await upload.write(piece)
            await upload.flush()
        finally:
            upload.close()
        return _written(upload)

    async def _upload_parts(
        self, exchange: Exchange, user: User, metadata: Mapping[str, str], boundary: str
    ) -> list[Written]:
        written: dict[str, Written] = {}
        upload: Upload | None = None
        try:
            parser = MultipartParser(boundary)
            async for piece in _decoded(exchange):
                for event in parser.feed(piece):
                    if isinstance(event, Part):
                        path = self._part_path(exchange, user, event, written)
                        upload = None if path is None else Upload(path, user, metadata)
                    elif upload is None:
                        continue
                    elif isinstance(event, Data):
                        await upload.write(event.data)
                    else:
                        await upload.flush()
                        upload.close()
                        written[upload.path] = _written(upload)
                        upload = None
            if not parser.is_complete:
                raise RefusedError(400, "the multipart body is truncated")
        except MultipartError as error:
            raise RefusedError(400, str(error)) from error
        finally:
            if upload is not None:
                upload.close()
        return list(written.values())

    def _part_path(
        self, exchange: Exchange, user: User, part: Part, written: Mapping[str, Written]
    ) -> str | None:
        """Where a part goes; `None` for form fields that are no files."""
        if part.name != "file":
            return None
        given = exchange.query.get("path")
        if given and written:
            raise RefusedError(400, "with a path parameter only one file can be uploaded")
        name = given or part.filename
        if not name:
            raise RefusedError(400, "neither the path parameter nor the part's filename says where")
        path = self._environment.resolve(name, user)
        if path in written:
            raise RefusedError(400, f"path {path!r} is uploaded twice in one request")
        return path

    async def _compose(self, exchange: Exchange) -> None:
        try:
            body = await exchange.body.read(1 << 20)
            request = msgspec.json.decode(body, type=ComposeRequest)
        except (msgspec.MsgspecError, BodyTooLargeError, RecursionError) as error:
            raise RefusedError(400, f"cannot read the request: {error}") from error
        if not request.source_paths or not request.destination:
            raise RefusedError(400, "source_paths and destination are required")
        user = self._environment.user(request.username or None)
        sources = [self._environment.resolve(path, user) for path in request.source_paths]
        destination = self._environment.resolve(request.destination, user)
        await in_thread(_concatenate, sources, destination, user)
        answer = Written(
            name=printable(posixpath.basename(destination)),
            path=printable(destination),
            type="file",
        )
        exchange.respond(
            200, msgspec.json.encode(answer), headers=[("Content-Type", "application/json")]
        )


def _explain(error: Exception) -> tuple[int, str]:
    if isinstance(error, RefusedError):
        return error.status, str(error)
    if isinstance(error, ConnectError):
        return (401 if error.code == "unauthenticated" else 400), error.message
    if not isinstance(error, OSError):
        return _NAMED[type(error)], str(error)
    status = _STATUS.get(error.errno or 0, 500)
    where = f" {os.fsdecode(error.filename)!r}" if isinstance(error.filename, str | bytes) else ""
    return status, f"cannot access{where}: {error.strerror}"


def _read_metadata(request_headers: Mapping[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    total = 0
    for name, value in request_headers.items():
        if not name.startswith(_METADATA_HEADER):
            continue
        key = name.removeprefix(_METADATA_HEADER)
        total += len(key) + len(value)
        if not key or len(key) > _MAX_METADATA_KEY:
            raise RefusedError(400, f"a metadata key must have 1 to {_MAX_METADATA_KEY} bytes")
        if not all(0x20 <= ord(c) < 0x7F for c in key + value):
            raise RefusedError(400, f"metadata {key!r} must be printable ASCII")
        found[key] = value
    if total > _MAX_METADATA:
        raise RefusedError(400, f"metadata may not exceed {_MAX_METADATA} bytes in all")
    return found


def _written(upload: Upload) -> Written:
    return Written(
        name=printable(posixpath.basename(upload.path)),
        path=printable(upload.path),
        metadata=upload.metadata,
        type="file",
    )


async def _decoded(exchange: Exchange) -> AsyncIterator[bytes]:
    """Give the body with its Content-Encoding undone."""
    encoding = exchange.headers.get("content-encoding", "identity").strip().lower()
    if encoding in ("identity", ""):
        while piece := await _arrived(exchange):
            yield piece
    elif encoding == "gzip":
        inflater = Inflater()
        try:
            while piece := await _arrived(exchange):
                for plain in inflater.feed(piece):
                    yield plain
                    await asyncio.sleep(0)
            inflater.finish()
        except BadGzipError as error:
            raise RefusedError(400, str(error)) from error
    else:
        raise RefusedError(400, f"unsupported content encoding {encoding!r}: use gzip or identity")


async def _arrived(exchange: Exchange) -> bytes:
    try:
        return await exchange.body.chunk(UPLOAD_PATIENCE)
    except TimeoutError:
        raise RefusedError(
            408, f"the upload was given up: nothing came for {UPLOAD_PATIENCE:g} s"
        ) from None


def _unsized(fd: int) -> bytes:
    """Read a file that claims to be empty: those of /proc and /sys often are not."""
    pieces: list[bytes] = []
    offset = 0
    while offset < _MAX_UNSIZED and (piece := os.pread(fd, _SAMPLE, offset)):
        pieces.append(piece)
        offset += len(piece)
    return b"".join(pieces)


def _shrinks(fd: int) -> bool:
    """Whether compressing is worth it: most clients accept gzip without needing it."""
    sample = os.pread(fd, _SAMPLE, 0)
    return bool(sample) and len(zlib.compress(sample, 1)) < 0.9 * len(sample) + 64


async def _send_gzip(exchange: Exchange, fd: int, common: list[tuple[str, str]]) -> None:
    exchange.start(200, [*common, ("Content-Encoding", "gzip")])
    engine = zlib.compressobj(level=1, wbits=31)
    offset = 0
    while data := os.pread(fd, _CHUNK, offset):
        offset += len(data)
        if packed := await in_thread(engine.compress, data):
            await exchange.write(packed)
    await exchange.write(engine.flush(), is_last=True)


def _concatenate(sources: list[str], destination: str, user: User) -> None:
    """Write beside the destination and rename, so that a source may be the destination."""
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
