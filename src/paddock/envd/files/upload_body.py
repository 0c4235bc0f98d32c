"""Reading the body of an upload: raw or multipart, compressed or not, and its target paths.

Authorization is in `routes.py`, the multipart parser in `http/multipart.py`, writing in
`uploads.py`.
"""

import asyncio
import posixpath
from collections.abc import AsyncIterator, Mapping

from msgspec import Struct

from paddock.envd.files.uploads import BadGzipError, Inflater, Upload, require_space
from paddock.envd.http.multipart import (
    MultipartError,
    MultipartParser,
    PartData,
    PartStart,
    parameters,
)
from paddock.envd.http.request import HttpError, HttpRequest
from paddock.envd.rpc.connect_frames import printable
from paddock.envd.sandbox_context import SandboxContext
from paddock.envd.users import User

UPLOAD_TIMEOUT_SECONDS = 600.0
"""The longest time without data in an upload; clients have no timeout of their own."""
_MAX_METADATA_KEY = 246
_MAX_METADATA = 4096
_METADATA_HEADER = "x-metadata-"


class WrittenFile(Struct, frozen=True, omit_defaults=True):
    """One uploaded file in the response."""

    name: str
    path: str
    metadata: Mapping[str, str] = {}
    type: str = ""


async def receive(request: HttpRequest, context: SandboxContext, user: User) -> list[WrittenFile]:
    """Write the files of an upload; return them."""
    metadata = _read_metadata(request.headers)
    kind, _, rest = request.headers.get("content-type", "").partition(";")
    kind = kind.strip().lower()
    if kind == "multipart/form-data":
        boundary = parameters(";" + rest).get("boundary", "")
        return await _receive_parts(request, context, user, metadata, boundary)
    if kind == "application/octet-stream":
        return [await _receive_raw(request, context, user, metadata)]
    raise HttpError(
        400,
        f"unsupported content type {kind!r}: send multipart/form-data or application/octet-stream",
    )


async def _receive_raw(
    request: HttpRequest, context: SandboxContext, user: User, metadata: Mapping[str, str]
) -> WrittenFile:
    if not request.query.get("path"):
        raise HttpError(400, "the path parameter is required for application/octet-stream")
    path = context.resolve(request.query["path"], user)
    length = request.headers.get("content-length", "")
    if length.isdigit():
        require_space(path, int(length))
    upload = Upload(path, user, metadata)
    try:
        async for piece in _decoded_body(request):
            await upload.write(piece)
        await upload.flush()
    finally:
        upload.close()
    return _written(upload)


async def _receive_parts(
    request: HttpRequest,
    context: SandboxContext,
    user: User,
    metadata: Mapping[str, str],
    boundary: str,
) -> list[WrittenFile]:
    written: dict[str, WrittenFile] = {}
    upload: Upload | None = None
    try:
        parser = MultipartParser(boundary)
        async for piece in _decoded_body(request):
            for event in parser.feed(piece):
                if isinstance(event, PartStart):
                    path = _part_path(request, context, user, event, written)
                    upload = None if path is None else Upload(path, user, metadata)
                elif upload is None:
                    continue
                elif isinstance(event, PartData):
                    await upload.write(event.data)
                else:
                    await upload.flush()
                    upload.close()
                    written[upload.path] = _written(upload)
                    upload = None
        if not parser.is_complete:
            raise HttpError(400, "the multipart body is truncated")
    except MultipartError as error:
        raise HttpError(400, str(error)) from error
    finally:
        if upload is not None:
            upload.close()
    return list(written.values())


def _part_path(
    request: HttpRequest,
    context: SandboxContext,
    user: User,
    part: PartStart,
    written: Mapping[str, WrittenFile],
) -> str | None:
    """Return the path of a part; `None` for form fields that are not files."""
    if part.name != "file":
        return None
    given = request.query.get("path")
    if given and written:
        raise HttpError(400, "with a path parameter only one file can be uploaded")
    name = given or part.filename
    if not name:
        raise HttpError(400, "no target: set the path parameter or the part's filename")
    path = context.resolve(name, user)
    if path in written:
        raise HttpError(400, f"path {path!r} is uploaded twice in one request")
    return path


def _read_metadata(request_headers: Mapping[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    total = 0
    for name, value in request_headers.items():
        if not name.startswith(_METADATA_HEADER):
            continue
        key = name.removeprefix(_METADATA_HEADER)
        total += len(key) + len(value)
        if not key or len(key) > _MAX_METADATA_KEY:
            raise HttpError(400, f"a metadata key must have 1 to {_MAX_METADATA_KEY} bytes")
        if not all(0x20 <= ord(c) < 0x7F for c in key + value):
            raise HttpError(400, f"metadata {key!r} must be printable ASCII")
        found[key] = value
    if total > _MAX_METADATA:
        raise HttpError(400, f"metadata may not exceed {_MAX_METADATA} bytes in all")
    return found


def _written(upload: Upload) -> WrittenFile:
    return WrittenFile(
        name=printable(posixpath.basename(upload.path)),
        path=printable(upload.path),
        metadata=upload.metadata,
        type="file",
    )


async def _decoded_body(request: HttpRequest) -> AsyncIterator[bytes]:
    """Yield the body without its Content-Encoding."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding in ("identity", ""):
        while piece := await _next_chunk(request):
            yield piece
    elif encoding == "gzip":
        inflater = Inflater()
        try:
            while piece := await _next_chunk(request):
                for plain in inflater.feed(piece):
                    yield plain
                    await asyncio.sleep(0)
            inflater.finish()
        except BadGzipError as error:
            raise HttpError(400, str(error)) from error
    else:
        raise HttpError(400, f"unsupported content encoding {encoding!r}: use gzip or identity")


async def _next_chunk(request: HttpRequest) -> bytes:
    try:
        return await request.body.chunk(UPLOAD_TIMEOUT_SECONDS)
    except TimeoutError:
        raise HttpError(
            408, f"the upload timed out: no data was received for {UPLOAD_TIMEOUT_SECONDS:g} s"
        ) from None
