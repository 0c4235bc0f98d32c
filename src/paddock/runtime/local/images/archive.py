"""Read images of other tools: OCI layouts and `docker save` / `podman save` archives.

Both are sets of blobs, one of which describes the image. `Blobs` reads them from a directory or a
tar; `read_bundle` returns a `Bundle` with the config and the names of the layers. `store` verifies
the checksums of the layers.
"""

import contextlib
import gzip
import hashlib
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Protocol, TypeVar, cast

import msgspec
from msgspec import Struct, field

from paddock.kit.errors import InvalidError, NotFoundError, UnsupportedError
from paddock.runtime.local.images.limits import ImportBudget
from paddock.runtime.local.images.model import ImageConfig, canonical_name

_T = TypeVar("_T")
_MAX_JSON = 8 << 20
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_INDEXES = frozenset(
    {
        "application/vnd.oci.image.index.v1+json",
        "application/vnd.docker.distribution.manifest.list.v2+json",
    }
)


class BlobDescriptor(Struct, frozen=True, kw_only=True, rename="camel"):
    """A reference to a blob."""

    digest: str
    media_type: str = ""
    annotations: Mapping[str, str] = {}
    platform: Mapping[str, object] = {}


class Index(Struct, frozen=True, kw_only=True):
    """`index.json`."""

    manifests: tuple[BlobDescriptor, ...] = ()


class ImageManifest(Struct, frozen=True, kw_only=True):
    """The config and layers of an image."""

    config: BlobDescriptor
    layers: tuple[BlobDescriptor, ...]


class DockerManifest(Struct, frozen=True, kw_only=True, rename="pascal"):
    """One entry of `manifest.json` in a `docker save` archive."""

    config: str
    layers: tuple[str, ...]
    repo_tags: tuple[str, ...] | None = None


class ContainerConfig(Struct, frozen=True, kw_only=True, rename="pascal"):
    """Defaults of the processes of an image."""

    env: tuple[str, ...] | None = None
    user: str = ""
    working_dir: str = ""
    entrypoint: tuple[str, ...] | None = None
    cmd: tuple[str, ...] | None = None


class RootFs(Struct, frozen=True, kw_only=True):
    """Checksums of the uncompressed layers."""

    diff_ids: tuple[str, ...] = ()


class ConfigBlob(Struct, frozen=True, kw_only=True):
    """The image's config blob."""

    config: ContainerConfig | None = None
    rootfs: RootFs = field(default_factory=RootFs)


class Blobs(Protocol):
    """Files by name."""

    def read(self, name: str) -> bytes:
        """Read a small blob."""
        ...

    def open(self, name: str) -> IO[bytes]:
        """Open a blob as a stream."""
        ...

    def has(self, name: str) -> bool: ...


# Made at import, not by the first use: see docs/decisions/0080.
_docker_manifests = msgspec.json.Decoder(tuple[DockerManifest, ...])
_indexes = msgspec.json.Decoder(Index)
_manifests = msgspec.json.Decoder(ImageManifest)
_configs = msgspec.json.Decoder(ConfigBlob)


class Bundle(Struct, frozen=True, kw_only=True):
    """An image found in an archive."""

    config: ImageConfig
    layers: tuple[str, ...]
    """Names of blobs, lowest first."""
    diff_ids: tuple[str, ...]
    names: tuple[str, ...] = ()


class DirectoryBlobs:
    """An OCI layout on disk."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def read(self, name: str) -> bytes:
        with self.open(name) as stream:
            return _read_limited(stream, name)

    def open(self, name: str) -> IO[bytes]:
        """Open a file; refuse symlinks and paths outside the layout."""
        path = self._root / name
        if path.is_symlink() or not path.resolve().is_relative_to(self._root.resolve()):
            raise InvalidError(f"the image refers to {name!r}, which is outside of it")
        try:
            return path.open("rb")
        except OSError as error:
            raise NotFoundError(f"the image has no {name!r}") from error

    def has(self, name: str) -> bool:
        return (self._root / name).is_file()


class TarBlobs:
    """Blobs in a tar, read in place."""

    def __init__(self, archive: tarfile.TarFile, budget: ImportBudget) -> None:
        self._archive = archive
        self._members: dict[str, tarfile.TarInfo] = {}
        for member in archive:
            # Before the next one is read: a compressed archive is unpacked up to there.
            budget.check_position(member.offset_data + member.size)
            budget.count_entry(member.name, 0)
            self._members[member.name.removeprefix("./")] = member

    @property
    def names(self) -> frozenset[str]:
        """Names of all members."""
        return frozenset(self._members)

    def read(self, name: str) -> bytes:
        with self.open(name) as stream:
            return _read_limited(stream, name)

    def open(self, name: str) -> IO[bytes]:
        """Open a member; follow links, by which `docker save` stores equal layers."""
        member = self._members.get(name)
        for _ in range(4):
            if member is None or not (member.issym() or member.islnk()):
                break
            target = member.linkname
            if member.issym():
                target = str(Path(member.name).parent / target)
            member = self._members.get(_normalize(target))
        stream = self._archive.extractfile(member) if member is not None else None
        if stream is None:
            raise NotFoundError(f"the archive has no {name!r}")
        return stream

    def has(self, name: str) -> bool:
        return name in self._members


class LayerStoredError(Exception):
    """A layer was not opened, because the store has got it meanwhile."""


class NotAnImageError(InvalidError):
    """The blobs are not an image in a known format."""


def read_bundle(blobs: Blobs, *, wanted: str | None = None, machine: str = "amd64") -> Bundle:
    """Return the image in a set of blobs, in either format; `docker save` archives have both."""
    if blobs.has("manifest.json"):
        return _docker_bundle(blobs, wanted)
    if blobs.has("index.json"):
        return _oci_bundle(blobs, wanted, machine)
    raise NotAnImageError(
        "not an image: it contains neither index.json (OCI) nor manifest.json (docker save), "
        "and it is not a root file system",
        hint="import an archive of `podman save`, `docker save` or `docker export`",
    )


@contextmanager
def open_layer(blobs: Blobs, name: str) -> Generator[IO[bytes], None, None]:
    """Open a layer and decompress it if needed."""
    with blobs.open(name) as raw:
        head = raw.read(4)
        raw.seek(0)
        if head.startswith(_GZIP):
            with gzip.GzipFile(fileobj=raw) as stream:
                yield cast("IO[bytes]", stream)
        elif head == _ZSTD:
            with _unzstd(raw) as stream:
                yield stream
        else:
            yield raw


class HashingReader(io.RawIOBase):
    """A stream that computes the checksum of the data read, and counts it."""

    def __init__(self, stream: IO[bytes], budget: ImportBudget) -> None:
        super().__init__()
        self._stream = stream
        self._budget = budget
        self._hash = hashlib.sha256()

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        data = self._stream.read(size)
        self._budget.count_stream(len(data))
        self._hash.update(data)
        return data

    @property
    def digest(self) -> str:
        """`sha256:<hex>` of everything read so far."""
        return f"sha256:{self._hash.hexdigest()}"


def _docker_bundle(blobs: Blobs, wanted: str | None) -> Bundle:
    entries = _decode(blobs.read("manifest.json"), _docker_manifests, "manifest.json")
    for entry in entries:
        if wanted is None or wanted in (entry.repo_tags or ()):
            blob = _decode(blobs.read(_normalize(entry.config)), _configs, entry.config)
            layers = tuple(_normalize(layer) for layer in entry.layers)
            return _bundle(blob, layers, entry.repo_tags or ())
    raise NotFoundError(f"the archive has no image {wanted!r}")


def _oci_bundle(blobs: Blobs, wanted: str | None, machine: str) -> Bundle:
    index = _decode(blobs.read("index.json"), _indexes, "index.json")
    chosen = _choose(index.manifests, wanted, machine)
    for _ in range(3):
        if chosen.media_type not in _INDEXES:
            break
        nested = _decode(blobs.read(_blob(chosen.digest)), _indexes, chosen.digest)
        chosen = _choose(nested.manifests, None, machine)
    manifest = _decode(blobs.read(_blob(chosen.digest)), _manifests, chosen.digest)
    blob = _decode(blobs.read(_blob(manifest.config.digest)), _configs, manifest.config.digest)
    layers = tuple(_blob(layer.digest) for layer in manifest.layers)
    name = chosen.annotations.get("org.opencontainers.image.ref.name")
    return _bundle(blob, layers, (name,) if name else ())


def _choose(found: tuple[BlobDescriptor, ...], wanted: str | None, machine: str) -> BlobDescriptor:
    fitting = [
        one
        for one in found
        if (wanted is None or one.annotations.get("org.opencontainers.image.ref.name") == wanted)
        and one.platform.get("architecture", machine) == machine
    ]
    if not fitting:
        raise NotFoundError(f"the archive has no image {wanted or ''!r} for {machine}")
    return fitting[0]


def _bundle(blob: ConfigBlob, layers: tuple[str, ...], names: tuple[str, ...]) -> Bundle:
    diff_ids = blob.rootfs.diff_ids
    if not layers or len(diff_ids) != len(layers):
        raise InvalidError(
            f"the image has {len(layers)} layers and {len(diff_ids)} checksums for them"
        )
    config = blob.config or ContainerConfig()
    pairs = (entry.partition("=") for entry in config.env or ())
    return Bundle(
        config=ImageConfig(
            env={key: value for key, _, value in pairs},
            user=config.user or None,
            workdir=config.working_dir or None,
            entrypoint=config.entrypoint or (),
            cmd=config.cmd or (),
        ),
        layers=layers,
        diff_ids=diff_ids,
        names=names,
    )


def bundle_of_config(config: bytes, layers: tuple[str, ...]) -> Bundle:
    """Return the image with this config blob and these layers."""
    return _bundle(_decode(config, _configs, "the config"), layers, ())


def _blob(digest: str) -> str:
    algorithm, _, value = digest.partition(":")
    if not algorithm.isalnum() or not value.isalnum():
        raise InvalidError(f"the image refers to {digest!r}, which is not a checksum")
    return f"blobs/{algorithm}/{value}"


def _decode(data: bytes, decoder: msgspec.json.Decoder[_T], origin: str) -> _T:
    try:
        return decoder.decode(data)
    except msgspec.DecodeError as error:
        raise InvalidError(f"{origin} of the image cannot be read: {error}") from error


def _read_limited(stream: IO[bytes], name: str) -> bytes:
    data = stream.read(_MAX_JSON + 1)
    if len(data) > _MAX_JSON:
        raise InvalidError(f"{name} of the image is larger than {_MAX_JSON} bytes")
    return data


def _normalize(name: str) -> str:
    parts: list[str] = []
    for part in name.split("/"):
        if part == "..":
            if not parts:
                raise InvalidError(f"the image refers to {name!r}, which is outside of it")
            parts.pop()
        elif part not in ("", "."):
            parts.append(part)
    return "/".join(parts)


@contextmanager
def _unzstd(raw: IO[bytes]) -> Generator[IO[bytes], None, None]:
    if not shutil.which("zstd"):
        raise UnsupportedError("a layer is compressed with zstd", hint="apt-get install zstd")
    with contextlib.ExitStack() as stack:
        source = raw
        if isinstance(raw, tarfile.ExFileObject):
            # Another process cannot read a member of a tar.
            source = cast("IO[bytes]", stack.enter_context(tempfile.TemporaryFile()))
            shutil.copyfileobj(raw, source)
        source.flush()
        os.lseek(source.fileno(), 0, os.SEEK_SET)
        process = stack.enter_context(
            subprocess.Popen(
                ["zstd", "--decompress", "--stdout", "--quiet"],
                stdin=source,
                stdout=subprocess.PIPE,
            )
        )
        # A process whose output is not read to its end would wait for ever.
        stack.callback(process.kill)
        yield cast("IO[bytes]", process.stdout)


def embedded_name(bundle: Bundle) -> str:
    """Return the name that an image has in its archive."""
    for name in bundle.names:
        # `registry/path/name:tag`: use the last part.
        with contextlib.suppress(InvalidError):
            return canonical_name(name.rpartition("/")[2])
    raise InvalidError("the archive has no name for its image", hint="pass a name")
