"""What an image is, and how one is named.

Plain values only: where images lie and how they get there is `store`'s, `archive`'s and `base`'s.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from paddock.kit.errors import InvalidError

_NAME = re.compile(r"[a-z0-9]+(?:[._/-]+[a-z0-9]+)*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_LAYER_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}")

DEFAULT_TAG = "latest"


class ImageConfig(Struct, frozen=True, kw_only=True):
    """What an image says about the processes that run in it."""

    env: Mapping[str, str] = {}
    user: str | None = None
    workdir: str | None = None
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()


class Manifest(Struct, frozen=True, kw_only=True):
    """An image as it is stored: layers by id, lowest first."""

    name: str
    """Canonical: `name:tag`."""
    layers: tuple[str, ...]
    """Ids in the store's `layers/`, or absolute paths of directories used where they are."""
    config: ImageConfig = ImageConfig()
    created_at: str = ""


# Made at import, not by the first use: see docs/decisions/0080.
_decoder = msgspec.json.Decoder(Manifest)


class Image(Struct, frozen=True, kw_only=True):
    """An image ready to be mounted."""

    name: str
    layers: tuple[Path, ...]
    """Read-only directories, lowest first (overlayfs wants them the other way round)."""
    config: ImageConfig = ImageConfig()

    @property
    def lowerdirs(self) -> tuple[Path, ...]:
        """The layers in overlayfs order: highest first."""
        return tuple(reversed(self.layers))


class ImageInfo(Struct, frozen=True, kw_only=True):
    """One line of a listing."""

    name: str
    layers: int
    size_bytes: int
    created_at: str


def canonical_name(reference: str) -> str:
    """Turn `name` or `name:tag` into `name:tag`, refusing what could not be one.

    Digests are not references here: an image is imported under a name by whoever has it.
    """
    name, colon, tag = reference.partition(":")
    tag = tag if colon else DEFAULT_TAG
    if len(name) > 200 or not _NAME.fullmatch(name) or not _TAG.fullmatch(tag):
        raise InvalidError(
            f"{reference!r} is no image name",
            hint="use lower-case letters, digits and . _ - / with an optional tag: python:3.12",
        )
    return f"{name}:{tag}"


def decode_manifest(data: bytes, *, origin: str) -> Manifest:
    """Read a stored manifest, refusing one that names anything but a layer."""
    try:
        manifest = _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise InvalidError(f"the image manifest {origin} cannot be read: {error}") from error
    if not manifest.layers:
        raise InvalidError(f"the image manifest {origin} has no layers")
    for layer in manifest.layers:
        if not (_is_plain_path(layer) or _LAYER_ID.fullmatch(layer)):
            raise InvalidError(f"the image manifest {origin} names {layer!r}, which is no layer")
    return manifest


def _is_plain_path(layer: str) -> bool:
    """Absolute, and without the characters that separate overlayfs options."""
    return (
        layer.startswith("/") and ".." not in layer.split("/") and not set(layer) & set(":,\\\n\0")
    )
