"""The image store: manifests by name, layers by content, shared by all sandboxes.

    <root>/refs/<name:tag, percent-quoted>.json
    <root>/layers/<id>/         read-only by convention: sandboxes see them through an overlay
    <root>/layers/accounts-<id>/  users that an image lacks; see `accounts`
    <root>/layers/.new-*        being unpacked; `collect` removes those left by a crash

A complete layer is renamed to its id. Equal layers are stored once.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import subprocess
import tarfile
import uuid
from collections.abc import Collection, Generator, Iterable, Iterator
from pathlib import Path
from typing import IO, cast
from urllib.parse import quote, unquote

import msgspec
from msgspec import structs

from paddock.kit.clock import Clock, SystemClock
from paddock.kit.errors import InvalidError, NotFoundError
from paddock.runtime.local.images import base
from paddock.runtime.local.images.accounts import plan_accounts, write_layer
from paddock.runtime.local.images.archive import (
    Blobs,
    Bundle,
    DirectoryBlobs,
    HashingReader,
    LayerStoredError,
    NotAnImageError,
    TarBlobs,
    open_layer,
    read_bundle,
)
from paddock.runtime.local.images.limits import (
    BoundedTarInfo,
    ImageLimits,
    ImportBudget,
    count_directory,
    packed_size,
)
from paddock.runtime.local.images.merged_tree import MergedTree
from paddock.runtime.local.images.model import (
    Image,
    ImageConfig,
    ImageInfo,
    Manifest,
    canonical_name,
    decode_manifest,
)
from paddock.runtime.local.images.registry.manifests import this_platform
from paddock.runtime.local.images.unpack import unpack_layer
from paddock.runtime.local.storage.backend import storage_error
from paddock.runtime.local.storage.reserve import DiskReserve

_TEMPORARY = ".new-"


class ImageStore:
    """The images below one directory, and the base image in the machine's cache."""

    def __init__(
        self,
        root: Path,
        *,
        base_cache: Path = base.DEFAULT_CACHE,
        clock: Clock | None = None,
        limits: ImageLimits | None = None,
        reserve: DiskReserve | None = None,
    ) -> None:
        self._reserve = reserve
        self._limits = limits or ImageLimits()
        self._refs = root / "refs"
        self._layers = root / "layers"
        self._lock = root / "lock"
        self._base_cache = base_cache
        self._clock = clock or SystemClock()
        self._base_image: Image | None = None
        for directory in (self._refs, self._layers):
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)

    def resolve(self, reference: str) -> Image:
        """Return an image that can be mounted. Raises `NotFoundError`."""
        name = canonical_name(reference)
        try:
            data = self._ref(name).read_bytes()
        except FileNotFoundError:
            if name == base.BASE_NAME and (image := self._base()) is not None:
                return image
            raise NotFoundError(f"there is no image {name}", hint=_missing_hint(name)) from None
        manifest = decode_manifest(data, origin=name)
        if manifest.facts is None:  # imported by an older version
            with self._import_lock():
                return self._write(self._completed(manifest))
        return self._image(manifest)

    def has(self, reference: str) -> bool:
        """Whether an image of that name exists."""
        name = canonical_name(reference)
        return self._ref(name).exists() or (name == base.BASE_NAME and self._base() is not None)

    def images(self) -> tuple[ImageInfo, ...]:
        """List all images by name."""
        manifests = {manifest.name: manifest for manifest in self._manifests()}
        built = base.usable_directory(self._base_cache)
        if base.BASE_NAME not in manifests and built is not None:
            path = built / base.MANIFEST
            manifests[base.BASE_NAME] = decode_manifest(path.read_bytes(), origin=str(path))
        return tuple(
            ImageInfo(
                name=name,
                layers=len(manifest.layers),
                size_bytes=sum(_disk_use(self._layer_path(layer)) for layer in manifest.layers),
                created_at=manifest.created_at,
            )
            for name, manifest in sorted(manifests.items())
        )

    def add(self, source: Path, reference: str | None = None) -> Image:
        """Import an image archive, an OCI layout, or a root file system."""
        if source.is_dir() and not (source / "oci-layout").exists():
            return self.add_directory(source, reference or source.name)
        try:
            return self.add_archive(source, reference)
        except NotAnImageError:
            if source.is_dir() or not _is_rootfs_tar(source, self._budget(source)):
                raise
            return self.add_rootfs_tar(source, reference or source.name.split(".")[0])

    def add_directory(
        self,
        source: Path,
        reference: str,
        *,
        config: ImageConfig | None = None,
        in_place: bool = False,
    ) -> Image:
        """Create an image of a directory: copy it, or use it in place."""
        name = canonical_name(reference)
        if not source.is_dir():
            raise InvalidError(f"{source} is not a directory")
        if in_place:
            return self._save(name, (str(source.resolve()),), config or ImageConfig())
        # A copy is as large as its source, whatever the ratio of sparse files.
        budget = self._budget(source)
        count_directory(source, budget)
        budget.check_reserve(budget.content_bytes)
        with self._import_lock(), self._new_layer() as fresh:
            _copy(source, fresh)
            layer = self._store_layer(fresh, f"dir-{uuid.uuid4().hex}")
            return self._save(name, (layer,), config or ImageConfig())

    def add_rootfs_tar(
        self, source: Path, reference: str, *, config: ImageConfig | None = None
    ) -> Image:
        """Create an image of a tar of a root file system (`docker export`, debootstrap, …)."""
        name = canonical_name(reference)
        with self._import_lock(), source.open("rb") as raw:
            layer = self._unpack(_SingleBlob(raw), "", expected=None, budget=self._budget(source))
            return self._save(name, (layer,), config or ImageConfig())

    def add_archive(
        self, source: Path, reference: str | None = None, *, wanted: str | None = None
    ) -> Image:
        """Import an OCI layout (directory or tar) or a `docker save`/`podman save` archive.

        Without a reference the image keeps the name it has in the archive.
        """
        if not source.exists():
            raise NotFoundError(f"there is no file {source}")
        budget = self._budget(source)
        if source.is_dir():
            return self._import(DirectoryBlobs(source), reference, wanted, budget)
        try:
            with tarfile.open(source, "r:*", tarinfo=BoundedTarInfo) as archive:
                blobs = TarBlobs(archive, self._budget(source))
                return self._import(blobs, reference, wanted, budget)
        except tarfile.TarError as error:
            raise InvalidError(f"{source} is not a readable tar: {error}") from error

    def tag(self, reference: str, new_reference: str) -> Image:
        """Add a second name to an image."""
        image = self.resolve(reference)
        layers = tuple(
            path.name if path.parent == self._layers else str(path) for path in image.layers
        )
        return self._save(canonical_name(new_reference), layers, image.config)

    def delete(self, reference: str) -> None:
        """Delete a name; `collect` removes its layers. Unknown names are ignored."""
        with contextlib.suppress(FileNotFoundError):
            self._ref(canonical_name(reference)).unlink()

    def collect(self, in_use: Collection[Path] = ()) -> tuple[str, ...]:
        """Remove layers that neither an image nor a sandbox uses; return their names."""
        removed: list[str] = []
        with self._locked(fcntl.LOCK_EX):
            kept = tuple(self._manifests())
            keep = {layer for manifest in kept for layer in (*manifest.layers, manifest.accounts)}
            keep |= {path.name for path in in_use if path.parent == self._layers}
            for name in os.listdir(self._layers):
                if name not in keep:
                    shutil.rmtree(self._layers / name)
                    removed.append(name)
        return tuple(removed)

    def build_base(self, progress: base.Progress | None = None) -> Image:
        """Build the base image if it is missing."""
        base.build_base(self._base_cache, progress=progress, clock=self._clock)
        return self.resolve(base.BASE_NAME)

    def _budget(self, source: Path) -> ImportBudget:
        packed = packed_size(source)
        budget = ImportBudget(
            self._limits, packed_bytes=packed, name=str(source), reserve=self._reserve
        )
        # What is unpacked is not smaller than the archive, whatever else it is.
        budget.check_reserve(0 if source.is_dir() else packed)
        return budget

    def has_layer(self, diff_id: str) -> bool:
        """Whether the layer with this checksum is stored."""
        return (self._layers / _layer_id(diff_id)).is_dir()

    def add_bundle(
        self, blobs: Blobs, bundle: Bundle, reference: str, *, packed_bytes: int, digest: str
    ) -> Image:
        """Import an image whose layers are those blobs; layers that are stored are not opened."""
        budget = ImportBudget(self._limits, packed_bytes=packed_bytes, name=reference)
        return self._import_bundle(blobs, bundle, canonical_name(reference), budget, digest=digest)

    def digest_of(self, reference: str) -> str:
        """Return the digest by which a registry has the image; empty: it was not pulled."""
        try:
            data = self._ref(canonical_name(reference)).read_bytes()
        except FileNotFoundError:
            return ""
        return decode_manifest(data, origin=reference).digest

    def _import(
        self, blobs: Blobs, reference: str | None, wanted: str | None, budget: ImportBudget
    ) -> Image:
        bundle = read_bundle(blobs, wanted=wanted, machine=this_platform().architecture)
        name = canonical_name(reference) if reference else _embedded_name(bundle)
        return self._import_bundle(blobs, bundle, name, budget)

    def _import_bundle(
        self, blobs: Blobs, bundle: Bundle, name: str, budget: ImportBudget, *, digest: str = ""
    ) -> Image:
        known = frozenset(os.listdir(self._layers))
        layers: list[str] = []
        try:
            with self._import_lock():
                for blob, diff_id in zip(bundle.layers, bundle.diff_ids, strict=True):
                    layers.append(self._unpack(blobs, blob, expected=diff_id, budget=budget))
                return self._save(name, tuple(layers), bundle.config, digest=digest)
        except BaseException:
            self._discard(layer for layer in layers if layer not in known)
            raise

    def _discard(self, layers: Iterable[str]) -> None:
        """Remove the layers of a failed import, unless another image has got them meanwhile."""
        with self._locked(fcntl.LOCK_EX):
            used = {layer for manifest in self._manifests() for layer in manifest.layers}
            for layer in set(layers) - used:
                shutil.rmtree(self._layers / layer, ignore_errors=True)

    def _unpack(
        self, blobs: Blobs, blob: str, *, expected: str | None, budget: ImportBudget
    ) -> str:
        if expected is not None:
            known = _layer_id(expected)
            if (self._layers / known).is_dir():
                return known
        try:
            return self._unpack_blob(blobs, blob, expected=expected, budget=budget)
        except LayerStoredError:
            # Another import was faster. It cannot be collected: this import has the lock.
            return _layer_id(expected or "")

    def _unpack_blob(
        self, blobs: Blobs, blob: str, *, expected: str | None, budget: ImportBudget
    ) -> str:
        with self._new_layer() as fresh, open_layer(blobs, blob) as stream:
            hashing = HashingReader(stream, budget)
            unpack_layer(cast("IO[bytes]", hashing), fresh, budget)
            if expected is not None and hashing.digest != expected:
                raise InvalidError(
                    f"layer {blob} is damaged: its checksum is {hashing.digest}, not {expected}"
                )
            return self._store_layer(fresh, _layer_id(hashing.digest))

    @contextlib.contextmanager
    def _new_layer(self) -> Generator[Path, None, None]:
        """Yield a temporary directory; it is removed unless it was renamed."""
        fresh = self._layers / f"{_TEMPORARY}{uuid.uuid4().hex}"
        fresh.mkdir(mode=0o755)
        try:
            yield fresh
        finally:
            shutil.rmtree(fresh, ignore_errors=True)

    def _store_layer(self, fresh: Path, name: str) -> str:
        with contextlib.suppress(OSError):
            fresh.rename(self._layers / name)
        if not (self._layers / name).is_dir():
            raise NotFoundError(f"the layer {name} could not be stored")
        return name

    def _save(
        self, name: str, layers: tuple[str, ...], config: ImageConfig, *, digest: str = ""
    ) -> Image:
        manifest = Manifest(
            name=name,
            layers=layers,
            config=config,
            created_at=self._clock.now().isoformat(),
            digest=digest,
        )
        return self._write(
            self._completed(decode_manifest(msgspec.json.encode(manifest), origin=name))
        )

    def _completed(self, manifest: Manifest) -> Manifest:
        """Return the manifest with the facts of its files, and with the users it lacks."""
        plan = plan_accounts(MergedTree([self._layer_path(layer) for layer in manifest.layers]))
        if not plan.entries:
            return structs.replace(manifest, facts=plan.facts)
        if not (self._layers / plan.layer_id).is_dir():
            with self._new_layer() as fresh:
                write_layer(plan, fresh)
                self._store_layer(fresh, plan.layer_id)
        return structs.replace(manifest, facts=plan.facts, accounts=plan.layer_id)

    def _write(self, manifest: Manifest) -> Image:
        path = self._ref(manifest.name)
        fresh = path.with_name(f"{_TEMPORARY}{uuid.uuid4().hex}")
        fresh.write_bytes(msgspec.json.encode(manifest))
        fresh.rename(path)
        return self._image(manifest)

    def _image(self, manifest: Manifest) -> Image:
        layers = tuple(self._layer_path(layer) for layer in manifest.layers)
        accounts = self._layer_path(manifest.accounts) if manifest.accounts else None
        for path in (*layers, *filter(None, [accounts])):
            if not path.is_dir():
                raise NotFoundError(
                    f"image {manifest.name} has lost its layer {path}", hint="import it again"
                )
        return Image(
            name=manifest.name,
            layers=layers,
            config=manifest.config,
            facts=manifest.facts or plan_accounts(MergedTree(layers)).facts,
            accounts=accounts,
        )

    def _base(self) -> Image | None:
        if self._base_image is not None:
            return self._base_image
        if (built := base.usable_directory(self._base_cache)) is None:
            return None
        path = built / base.MANIFEST
        image = self._image(decode_manifest(path.read_bytes(), origin=str(path)))
        if built == base.base_directory(self._base_cache):  # an older one may be replaced any time
            self._base_image = image
        return image

    def _manifests(self) -> Iterator[Manifest]:
        for entry in sorted(os.listdir(self._refs)):
            if entry.endswith(".json"):
                name = unquote(entry.removesuffix(".json"))
                yield decode_manifest((self._refs / entry).read_bytes(), origin=name)

    def _layer_path(self, layer: str) -> Path:
        return Path(layer) if layer.startswith("/") else self._layers / layer

    def _ref(self, name: str) -> Path:
        return self._refs / f"{quote(name, safe='')}.json"

    def _import_lock(self) -> contextlib.AbstractContextManager[None]:
        """Return a lock that blocks `collect` until the manifest is written."""
        return self._locked(fcntl.LOCK_SH)

    @contextlib.contextmanager
    def _locked(self, how: int) -> Generator[None, None, None]:
        with self._lock.open("w") as lock:
            fcntl.flock(lock, how)
            yield


class _SingleBlob:
    """One open file as a set of blobs."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw

    def read(self, name: str) -> bytes:
        raise NotFoundError(f"there is no {name!r}")

    def open(self, name: str) -> IO[bytes]:
        return self._raw

    def has(self, name: str) -> bool:
        return False


def _embedded_name(bundle: Bundle) -> str:
    for name in bundle.names:
        # `registry/path/name:tag`: use the last part.
        with contextlib.suppress(InvalidError):
            return canonical_name(name.rpartition("/")[2])
    raise InvalidError("the archive has no name for its image", hint="pass a name")


def _layer_id(digest: str) -> str:
    algorithm, _, value = digest.partition(":")
    if algorithm != "sha256" or not value.isalnum():
        raise InvalidError(f"{digest!r} is not a sha256 checksum")
    return f"{algorithm}-{value.lower()}"


def _missing_hint(name: str) -> str:
    if name == base.BASE_NAME:
        return "build it: paddock image build-base"
    return "list images: paddock image ls; get one: paddock image pull, paddock image import"


def _is_rootfs_tar(source: Path, budget: ImportBudget) -> bool:
    with tarfile.open(source, "r:*", tarinfo=BoundedTarInfo) as archive:
        names = TarBlobs(archive, budget).names
    return any(name.split("/")[0] in ("bin", "usr") for name in names)


def _copy(source: Path, target: Path) -> None:
    done = subprocess.run(
        ["cp", "-a", "--reflink=auto", "-T", str(source), str(target)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        if "No space left" in done.stderr:
            raise storage_error(OSError(errno.ENOSPC, done.stderr), f"cannot import {source}")
        raise InvalidError(f"{source} could not be copied: {done.stderr.strip()[-500:]}")


def _disk_use(path: Path) -> int:
    total = 0
    for directory, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(directory, name)).st_blocks * 512
    return total
