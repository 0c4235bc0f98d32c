"""The manifest next to CRIU's images, and edits of the `userns` image.

`paddock.json` is written last: images without it belong to an incomplete dump. It lists every file
with its size, so that damage by a crash of the machine is detected before a restore.
"""

import os
import struct
from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from paddock.kit.errors import UnavailableError
from paddock.wire.protobuf import decode_message, encode_message, get_bytes, get_int

FILE = "paddock.json"
_VERSION = 1
_HEADER_SIZE = 8
_MASK32 = 0xFFFFFFFF
_LENGTH = struct.Struct("<I")


class StoredMemory(Struct, frozen=True, kw_only=True):
    """The manifest: what a restore needs to know."""

    version: int = _VERSION
    id_base: int
    """First host id of the range at the time of the dump."""
    id_count: int
    devices: Mapping[str, str] = {}
    """Host paths of device nodes by CRIU's key for their mounts."""
    externals: Mapping[str, str] = {}
    """CRIU's keys of other bind mounts by their mount point inside."""
    sizes: Mapping[str, int] = {}
    """Sizes of files of the host that were mounted below /proc and /sys, by mount point. CRIU
    refuses to reopen a file that has another size."""
    files: Mapping[str, int] = {}
    """Sizes of the images."""


# Made at import, not by the first use: see docs/decisions/0080.
_decoder = msgspec.json.Decoder(StoredMemory)


def write(directory: Path, memory: StoredMemory) -> StoredMemory:
    """Write the manifest of a finished dump; return it with the file sizes."""
    files: dict[str, int] = {}
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.endswith(".img"):
                files[entry.name] = entry.stat().st_size
                # Restored processes read some images when they are not root on the host any
                # more. The directories above restrict access.
                os.chmod(entry.path, 0o644)
    directory.chmod(0o711)
    stored = msgspec.structs.replace(memory, files=files)
    fresh = directory / f".{FILE}"
    fresh.write_bytes(msgspec.json.encode(stored))
    fresh.rename(directory / FILE)
    return stored


def sync(directory: Path) -> None:
    """Sync a directory and its files to disk."""
    with os.scandir(directory) as entries:
        paths = [entry.path for entry in entries if entry.is_file(follow_symlinks=False)]
    for path in (*paths, str(directory), str(directory.parent)):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def is_complete(directory: Path) -> bool:
    """Whether a dump into this directory has finished."""
    return (directory / FILE).is_file()


def read(directory: Path) -> StoredMemory:
    """Read the manifest. Raises `UnavailableError` for an incomplete or damaged dump."""
    start_over = "start the sandbox from its files instead"
    try:
        memory = _decoder.decode((directory / FILE).read_bytes())
    except FileNotFoundError as error:
        raise UnavailableError(
            f"{directory} contains no complete memory dump", hint=start_over
        ) from error
    except msgspec.DecodeError as error:
        raise UnavailableError(
            f"the stored memory in {directory} cannot be read: {error}", hint=start_over
        ) from error
    if memory.version != _VERSION:
        raise UnavailableError(
            f"the stored memory in {directory} has format {memory.version}, not {_VERSION}",
            hint=start_over,
        )
    for name, size in memory.files.items():
        try:
            found = (directory / name).stat().st_size
        except FileNotFoundError:
            found = -1
        if found != size:
            raise UnavailableError(
                f"the stored memory in {directory} is damaged: "
                f"{name} has {found} bytes instead of {size}",
                hint=start_over,
            )
    return memory


def with_id_range(image: bytes, base: int, count: int) -> bytes:
    """Return a `userns` image with another range: id 0 inside is `base` on the host."""
    extent = encode_message([(1, 0), (2, base), (3, count)])
    body = encode_message([(1, extent), (2, extent)])
    return image[:_HEADER_SIZE] + _LENGTH.pack(len(body)) + body


def id_range(image: bytes) -> tuple[int, int]:
    """Return base and count of the range in a `userns` image."""
    (length,) = _LENGTH.unpack_from(image, _HEADER_SIZE)
    start = _HEADER_SIZE + _LENGTH.size
    entry = decode_message(image[start : start + length])
    extent = decode_message(get_bytes(entry, 1))
    return get_int(extent, 2) & _MASK32, get_int(extent, 3) & _MASK32
