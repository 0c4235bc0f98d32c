"""What we keep beside CRIU's images, and the one image we edit.

`paddock.json` is written last: images without it are those of a dump that was cut off. It lists
every file with its size, so that one damaged by a crash of the machine is noticed before CRIU
trips over it.
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
    """What must be known to restore."""

    version: int = _VERSION
    id_base: int
    """First host id of the range the processes had."""
    id_count: int
    devices: Mapping[str, str] = {}
    """Host paths of device nodes by CRIU's key for their mounts."""
    externals: Mapping[str, str] = {}
    """CRIU's keys of other bind mounts by their mount point inside."""
    files: Mapping[str, int] = {}
    """Sizes of the images."""


# Made at import, not by the first use: see docs/decisions/0080.
_decoder = msgspec.json.Decoder(StoredMemory)


def write(directory: Path, memory: StoredMemory) -> StoredMemory:
    """Seal a finished dump."""
    files: dict[str, int] = {}
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.endswith(".img"):
                files[entry.name] = entry.stat().st_size
                # Some images are read by the first steps of restored processes, which are not
                # root outside any more. Who may get here is decided by the directories above.
                os.chmod(entry.path, 0o644)
    directory.chmod(0o711)
    sealed = msgspec.structs.replace(memory, files=files)
    fresh = directory / f".{FILE}"
    fresh.write_bytes(msgspec.json.encode(sealed))
    fresh.rename(directory / FILE)
    return sealed


def sync(directory: Path) -> None:
    """Wait until everything in a directory, and the directory, is on the disk."""
    with os.scandir(directory) as entries:
        paths = [entry.path for entry in entries if entry.is_file(follow_symlinks=False)]
    for path in (*paths, str(directory), str(directory.parent)):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def is_whole(directory: Path) -> bool:
    """Whether a dump into this directory was finished."""
    return (directory / FILE).is_file()


def read(directory: Path) -> StoredMemory:
    """Read what is stored, refusing what is not whole."""
    start_over = "start the sandbox from its files instead"
    try:
        memory = _decoder.decode((directory / FILE).read_bytes())
    except FileNotFoundError as error:
        raise UnavailableError(
            f"no memory is stored in {directory}, or storing it was cut off", hint=start_over
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
    """Give a `userns` image another range: inside 0 is `base` outside."""
    extent = encode_message([(1, 0), (2, base), (3, count)])
    body = encode_message([(1, extent), (2, extent)])
    return image[:_HEADER_SIZE] + _LENGTH.pack(len(body)) + body


def id_range(image: bytes) -> tuple[int, int]:
    """Read base and count of the range in a `userns` image."""
    (length,) = _LENGTH.unpack_from(image, _HEADER_SIZE)
    start = _HEADER_SIZE + _LENGTH.size
    entry = decode_message(image[start : start + length])
    extent = decode_message(get_bytes(entry, 1))
    return get_int(extent, 2) & _MASK32, get_int(extent, 3) & _MASK32
