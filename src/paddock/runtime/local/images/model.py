"""The data types and names of images.

`store` stores images, `archive` imports them, `base` builds the base image.
"""

import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

import msgspec
from msgspec import Struct

from paddock.kit.errors import InvalidError

_NAME = re.compile(r"[a-z0-9]+(?:[._/-]+[a-z0-9]+)*")
_HOST = re.compile(r"[a-z0-9.-]+:[0-9]{1,5}/")
"""The start of a name with the port of a registry."""
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_LAYER_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}")

DEFAULT_TAG = "latest"


class ImageConfig(Struct, frozen=True, kw_only=True):
    """Defaults of the processes of an image."""

    env: Mapping[str, str] = {}
    user: str | None = None
    workdir: str | None = None
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()


class ImageFacts(Struct, frozen=True, kw_only=True):
    """What the files of an image offer, read once."""

    shell: str | None
    """The program that runs command lines; None if the image has no shell."""
    users: tuple[str, ...]
    """The names in its /etc/passwd, with those that Paddock adds."""


class Manifest(Struct, frozen=True, kw_only=True):
    """A stored image: layers by id, lowest first."""

    name: str
    """Canonical: `name:tag`."""
    layers: tuple[str, ...]
    """Ids in the store's `layers/`, or absolute paths of directories used in place."""
    config: ImageConfig = ImageConfig()
    created_at: str = ""
    facts: ImageFacts | None = None
    """None in manifests of older versions: read when the image is used next."""
    accounts: str = ""
    """The id of the layer with missing users (see `accounts`), above all others; empty: none."""
    digest: str = ""
    """The digest of its manifest in the registry that it was pulled from."""
    teams: tuple[str, ...] | None = None
    """The teams that have shown the registry credentials that it accepts. `None`: everyone may use
    it (see `access`)."""
    pulled_by: str = ""
    """The team for which it was pulled (see `registry/team_share`); empty: the operator."""


class PulledFrom(Struct, frozen=True):
    """Where a pulled image comes from."""

    digest: str
    teams: tuple[str, ...] | None
    """The teams that may use it; `None`: all."""
    team: str = ""
    """The team for which it was pulled; empty: the operator."""


# Made at import, not by the first use: see docs/decisions/0080.
_decoder = msgspec.json.Decoder(Manifest)


class Image(Struct, frozen=True, kw_only=True):
    """An image that can be mounted."""

    name: str
    layers: tuple[Path, ...]
    """Read-only directories, lowest first (overlayfs expects the opposite order)."""
    config: ImageConfig = ImageConfig()
    facts: ImageFacts
    accounts: Path | None = None
    """The layer with users that the image lacks."""
    digest: str = ""
    """The digest of its manifest in the registry that it was pulled from."""

    @property
    def lowerdirs(self) -> tuple[Path, ...]:
        """All layers in overlayfs order: highest first."""
        own = tuple(reversed(self.layers))
        return own if self.accounts is None else (self.accounts, *own)


class ImageInfo(Struct, frozen=True, kw_only=True):
    """One line of a listing."""

    name: str
    layers: int
    size_bytes: int
    created_at: str
    digest: str = ""
    """By which its registry has it; empty: it was not pulled."""
    last_used: datetime | None = None
    """None for images that are built in."""


def canonical_name(reference: str) -> str:
    """Return `name:tag` for `name` or `name:tag`. Raises `InvalidError` for invalid names.

    The name may begin with the host and port of a registry, and end with a digest.
    """
    rest, at, digest = reference.partition("@")
    host = match[0] if (match := _HOST.match(rest)) else ""
    name, colon, tag = rest.removeprefix(host).partition(":")
    if not colon:
        tag = "" if at else DEFAULT_TAG
    is_valid = (
        len(reference) <= 300
        and _NAME.fullmatch(name)
        and (_TAG.fullmatch(tag) or (at and not colon))
        and (not at or _DIGEST.fullmatch(digest))
    )
    if not is_valid:
        raise InvalidError(
            f"{reference!r} is not an image name",
            hint="use lower-case letters, digits and . _ - / with an optional tag: python:3.12",
        )
    return f"{host}{name}{':' if tag else ''}{tag}{at}{digest}"


def layer_id(digest: str) -> str:
    """Return the id of a layer with this checksum. Raises `InvalidError` for another text."""
    algorithm, _, value = digest.partition(":")
    if algorithm != "sha256" or not value.isalnum():
        raise InvalidError(f"{digest!r} is not a sha256 checksum")
    return f"{algorithm}-{value.lower()}"


def decode_manifest(data: bytes, *, origin: str) -> Manifest:
    """Decode a stored manifest. Raises `InvalidError` for an invalid one."""
    try:
        manifest = _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise InvalidError(f"the image manifest {origin} cannot be read: {error}") from error
    if not manifest.layers:
        raise InvalidError(f"the image manifest {origin} has no layers")
    for layer in (*manifest.layers, *filter(None, [manifest.accounts])):
        if not (_is_plain_path(layer) or _LAYER_ID.fullmatch(layer)):
            raise InvalidError(f"the image manifest {origin} names {layer!r}, which is not a layer")
    return manifest


def _is_plain_path(layer: str) -> bool:
    """Whether a path is absolute and has no separators of overlayfs options."""
    return (
        layer.startswith("/") and ".." not in layer.split("/") and not set(layer) & set(":,\\\n\0")
    )
