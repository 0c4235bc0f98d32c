"""Manifests of registries: decode them, choose the platform, describe the layers. Pure."""

import platform
from collections.abc import Mapping

import msgspec
from msgspec import Struct

from paddock.kit.errors import InvalidError, NotFoundError, UnsupportedError

_OCI = "application/vnd.oci.image"
_DOCKER = "application/vnd.docker.distribution"
_INDEXES = (f"{_OCI}.index.v1+json", f"{_DOCKER}.manifest.list.v2+json")
_MANIFESTS = (f"{_OCI}.manifest.v1+json", f"{_DOCKER}.manifest.v2+json")
MANIFEST_TYPES = (*_INDEXES, *_MANIFESTS)
"""The media types that are requested."""
MAX_LAYERS = 500
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_BASELINES = {"amd64": 1, "arm64": 8}
"""The variant that the name of an architecture alone stands for."""


class Platform(Struct, frozen=True, kw_only=True):
    """The platform of a manifest in an index."""

    architecture: str = ""
    os: str = ""
    variant: str = ""

    def __str__(self) -> str:
        return "/".join(filter(None, (self.os, self.architecture, self.variant)))


class Descriptor(Struct, frozen=True, kw_only=True, rename="camel"):
    """A reference to a manifest, a config or a layer."""

    digest: str
    size: int
    media_type: str = ""
    platform: Platform | None = None
    annotations: Mapping[str, str] = {}
    urls: tuple[str, ...] = ()


class RegistryManifest(Struct, frozen=True, kw_only=True, rename="camel"):
    """An index, or the manifest of one image."""

    schema_version: int = 0
    media_type: str = ""
    manifests: tuple[Descriptor, ...] | None = None
    config: Descriptor | None = None
    layers: tuple[Descriptor, ...] | None = None


_decoder = msgspec.json.Decoder(RegistryManifest)


def decode_manifest(data: bytes, name: str) -> RegistryManifest:
    """Decode a manifest. Raises if it is malformed or of an old format."""
    try:
        found = _decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidError(f"the manifest of {name} cannot be read: {error}") from error
    if found.schema_version != 2:
        raise UnsupportedError(
            f"the manifest of {name} has schema version {found.schema_version}; 2 is supported",
            hint="push the image again with a current tool",
        )
    for descriptor in (
        *(found.manifests or ()),
        *(found.layers or ()),
        *filter(None, [found.config]),
    ):
        _check(descriptor, name)
    return found


def this_platform() -> Platform:
    """Return the platform of this machine."""
    machine = platform.machine()
    return Platform(os="linux", architecture=_ARCHITECTURES.get(machine, machine))


def choose_platform(index: RegistryManifest, wanted: Platform, name: str) -> Descriptor:
    """Return the manifest of an index for a platform.

    Of several variants the highest that the platform includes, else the lowest there is: an index
    need not say that its only image is for every machine of the architecture.
    """
    found = index.manifests or ()
    fitting = [
        (_level(one), descriptor)
        for descriptor in found
        if (one := descriptor.platform) is not None
        and (one.os, one.architecture) == (wanted.os, wanted.architecture)
    ]
    if fitting:
        limit = _level(wanted)
        return min(fitting, key=lambda item: (item[0] > limit, abs(limit - item[0])))[1]
    offered = sorted(
        {str(one.platform) for one in found if one.platform and one.platform.os != "unknown"}
    )
    raise NotFoundError(
        f"image {name!r} not found for {wanted}",
        hint=f"the registry has it for {', '.join(offered[:20]) or 'no platform'}",
    )


def _level(one: Platform) -> int:
    """Return the number of a variant such as `v8`; without one, that of the architecture."""
    number = one.variant.removeprefix("v")
    # At most two digits: a registry may send anything.
    if number.isascii() and number.isdecimal() and len(number) <= 2:
        return int(number)
    return _BASELINES.get(one.architecture, 0)


def layers_of(manifest: RegistryManifest, name: str) -> tuple[Descriptor, tuple[Descriptor, ...]]:
    """Return the config and the layers of an image, lowest first."""
    if manifest.config is None or not manifest.layers:
        raise InvalidError(f"the manifest of {name} is not that of an image")
    if len(manifest.layers) > MAX_LAYERS:
        raise InvalidError(f"{name} has {len(manifest.layers)} layers; at most {MAX_LAYERS}")
    for layer in manifest.layers:
        if "foreign" in layer.media_type or "nondistributable" in layer.media_type or layer.urls:
            raise UnsupportedError(f"a layer of {name} is not stored in the registry")
        if ".tar" not in layer.media_type:
            raise UnsupportedError(
                f"a layer of {name} has the type {layer.media_type[:100]!r}",
                hint="only images of file systems can be pulled",
            )
    return manifest.config, manifest.layers


def _check(descriptor: Descriptor, name: str) -> None:
    algorithm, _, value = descriptor.digest.partition(":")
    if algorithm != "sha256" or len(value) != 64 or set(value) - set("0123456789abcdef"):
        raise InvalidError(
            f"the manifest of {name} has the malformed digest {descriptor.digest[:100]!r}"
        )
    if descriptor.size < 0:
        raise InvalidError(f"the manifest of {name} has a negative size")
