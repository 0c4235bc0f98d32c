"""The image store: manifests by name, layers by content, shared by all sandboxes.

    <root>/refs/<name:tag, percent-quoted>.json
    <root>/layers/<id>/         read-only by convention: sandboxes see them through an overlay
    <root>/layers/accounts-<id>/  users that an image lacks; see `accounts`
    <root>/layers/.new-*        being unpacked; `collect` removes those left by a crash

    <root>/imports/             what running imports need; see `layers/imports`

A complete layer is renamed to its id. Equal layers are stored once. What a failed import has
unpacked is unused, and removed as such.
"""

import contextlib
import fcntl
import gzip
import lzma
import shutil
import tarfile
import uuid
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

import msgspec
from msgspec import structs

from paddock.kit.clock import Clock, SystemClock
from paddock.kit.errors import InvalidError, NotFoundError
from paddock.runtime.local.images import base
from paddock.runtime.local.images.access import granted, layers_of_team, may_replace
from paddock.runtime.local.images.accounts import plan_accounts, write_layer
from paddock.runtime.local.images.archive import (
    Blobs,
    Bundle,
    DirectoryBlobs,
    NotAnImageError,
    TarBlobs,
    embedded_name,
    read_bundle,
)
from paddock.runtime.local.images.debian.recipe import BUILT_IN, Recipe, built_in
from paddock.runtime.local.images.layers.directory import CountedBlobs, LayerDirectory, locked
from paddock.runtime.local.images.limits import (
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
    PulledFrom,
    canonical_name,
    decode_manifest,
    layer_id,
)
from paddock.runtime.local.images.refs import ImageRefs
from paddock.runtime.local.images.registry.manifests import this_platform
from paddock.runtime.local.images.rootfs import (
    SingleBlob,
    copy_tree,
    disk_use,
    is_rootfs_tar,
)
from paddock.runtime.local.storage.btrfs_ioctl import sync_tree
from paddock.runtime.local.storage.reserve import DiskReserve
from paddock.wire.bounded_tar import BoundedTarInfo

_CHECKSUM_PREFIX = "sha256-"
"""Start of the ids of layers that are named after their checksum."""

_ALIASES = {"e2bdev/base:latest": base.BASE_NAME}
"""Names of other platforms for an image, unless an image of that name is stored."""


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
        self._refs = ImageRefs(root / "refs")
        self._layers = LayerDirectory(root)
        self._refs_lock = root / "refs.lock"
        self._base_cache = base_cache
        self._clock = clock or SystemClock()
        self._built_in_images: dict[str, Image] = {}

    def resolve(self, reference: str) -> Image:
        """Return an image that can be mounted. Raises `NotFoundError`."""
        name = self.known_name(reference)
        if (manifest := self.manifest(name)) is None:
            if (image := self._built_in(name)) is not None:
                return image
            raise NotFoundError(f"there is no image {name}", hint=base.missing_hint(name))
        return self.image(manifest)

    def image(self, manifest: Manifest) -> Image:
        """Return the image of a manifest. Raises `NotFoundError` if it has lost a layer."""
        if manifest.facts is None:  # imported by an older version
            with self.keeping_layers():
                facts = self._completed(manifest)
            with self._writing_refs():
                current = self._refs.get(manifest.name)
                if current is not None and current.layers == facts.layers:
                    found = structs.replace(current, facts=facts.facts, accounts=facts.accounts)
                    return self._write(found)
            return self._image(facts)
        return self._image(manifest)

    def has(self, reference: str) -> bool:
        """Whether an image of that name exists."""
        name = self.known_name(reference)
        return name in self._refs or self._built_in(name) is not None

    def images(self) -> tuple[ImageInfo, ...]:
        """List all images by name."""
        manifests = {manifest.name: manifest for manifest in self._refs.all()}
        for name in base.BUILT_IN_NAMES:
            if name not in manifests and (built := self.built_in_manifest(name)) is not None:
                manifests[name] = built
        return tuple(
            ImageInfo(
                name=name,
                layers=len(manifest.layers),
                size_bytes=sum(disk_use(self._layer_path(layer)) for layer in manifest.layers),
                created_at=manifest.created_at,
                digest=manifest.digest,
                last_used=self._refs.used_at(name),
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
            if source.is_dir() or not is_rootfs_tar(source, self._budget(source)):
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
            return self._save((name,), (str(source.resolve()),), config or ImageConfig())
        # A copy is as large as its source, whatever the ratio of sparse files.
        budget = self._budget(source)
        count_directory(source, budget)
        budget.check_reserve(budget.content_bytes)
        with self.keeping_layers(), self._layers.new() as fresh:
            copy_tree(source, fresh)
            layer = self._layers.store(fresh, f"dir-{uuid.uuid4().hex}")
            return self._save((name,), (layer,), config or ImageConfig())

    def add_rootfs_tar(
        self, source: Path, reference: str, *, config: ImageConfig | None = None
    ) -> Image:
        """Create an image of a tar of a root file system (`docker export`, debootstrap, …)."""
        name = canonical_name(reference)
        with self.keeping_layers(), source.open("rb") as raw:
            budget = self._budget(source)
            layer = self._layers.unpack(SingleBlob(raw), "", expected=None, budget=budget, owner="")
            return self._save((name,), (layer,), config or ImageConfig())

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
        except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError) as error:
            raise InvalidError(f"{source} is not a readable tar: {error}") from error

    def tag(self, reference: str, new_reference: str) -> Image:
        """Add a second name to an image."""
        image = self.resolve(reference)
        layers = tuple(
            path.name if path.parent == self._layers.path else str(path) for path in image.layers
        )
        return self._save((canonical_name(new_reference),), layers, image.config)

    def delete(self, reference: str) -> None:
        """Delete a name; `collect` removes its layers. Unknown names are ignored."""
        self._refs.remove(canonical_name(reference))

    def unused_layers(self, in_use: Collection[Path] = ()) -> frozenset[str]:
        """Return the layers that no image, sandbox or running import uses."""
        # In this order: what an import has ended with is found among the images.
        stored = self._layers.names()
        importing = self._layers.importing(stored)
        kept = tuple(self._refs.all())
        keep = {layer for manifest in kept for layer in (*manifest.layers, manifest.accounts)}
        keep |= {path.name for path in in_use if path.parent == self._layers.path}
        return stored - keep - importing

    def collect(
        self, in_use: Collection[Path] = (), *, only: Collection[str] | None = None
    ) -> tuple[str, ...]:
        """Remove unused layers (`only` these); return their names.

        None are removed while layers are read, or a directory is copied (`keeping_layers`).
        """
        with self._layers.removing() as is_free:
            if not is_free:
                return ()
            unused = self.unused_layers(in_use)
            removed = tuple(sorted(unused if only is None else unused & set(only)))
            for name in removed:
                shutil.rmtree(self._layers.path / name)
            return removed

    @property
    def refs(self) -> ImageRefs:
        """The names of the images."""
        return self._refs

    def size_of(self, layers: Iterable[str]) -> int:
        """Return the bytes that layers take on the disk."""
        return sum(disk_use(self._layer_path(layer)) for layer in layers)

    def build_base(
        self, progress: base.Progress | None = None, *, recipe: Recipe | None = None
    ) -> Image:
        """Build the base image, or that of a recipe, if it is missing.

        An image of one's own recipe is stored under its name, also in place of a built-in one.
        """
        recipe = recipe or built_in()
        build = base.build_base(
            self._base_cache, recipe=recipe, progress=progress, clock=self._clock
        )
        manifest = base.read_manifest(build)
        if recipe.name in BUILT_IN and recipe == built_in(recipe.name):
            return self.resolve(manifest.name)
        with self.keeping_layers():
            return self._save((manifest.name,), manifest.layers, manifest.config)

    def _budget(self, source: Path) -> ImportBudget:
        packed = packed_size(source)
        budget = ImportBudget(
            self._limits, packed_bytes=packed, name=str(source), reserve=self._reserve
        )
        # What is unpacked is not smaller than the archive, whatever else it is.
        budget.check_reserve(0 if source.is_dir() else packed)
        return budget

    def has_layer(self, digest: str) -> bool:
        """Whether a layer with this checksum is stored, whoever may use it."""
        return self._layers.has(layer_id(digest))

    def stored_layers(self, team: str | None) -> frozenset[str]:
        """Return the checksums of the layers that a team may use; `None` is the operator."""
        known = self._layers.names()
        if team is not None:
            known &= layers_of_team(self._refs.all(), team)
        return frozenset(
            name.replace("-", ":", 1) for name in known if name.startswith(_CHECKSUM_PREFIX)
        )

    def add_bundle(
        self,
        blobs: Blobs,
        bundle: Bundle,
        names: Sequence[str],
        origin: PulledFrom,
        *,
        known: Collection[str],
        on_bytes: Callable[[int], None] | None = None,
    ) -> Image:
        """Import a pulled image. The `known` layers, which are stored, are not opened.

        The first name is that of this version, and the last one is that of its tag. `on_bytes` is
        called with the number of bytes that are about to be unpacked, and may refuse them.
        """
        budget = ImportBudget(
            self._limits,
            packed_bytes=0,
            name=names[-1],
            reserve=self._reserve,
            on_bytes=on_bytes,
        )
        return self._import_bundle(
            CountedBlobs(blobs, budget),
            bundle,
            tuple(map(canonical_name, names)),
            budget,
            origin=origin,
            known=frozenset(map(layer_id, known)),
        )

    def add_version(
        self, version: str, reference: str, teams: tuple[str, ...] | None
    ) -> Image | None:
        """Let a tag name a stored version, and let more teams use it.

        `None`: it is not stored, or has lost a layer.
        """
        with self.keeping_layers(), self._writing_refs():
            manifest = self.manifest(version)
            if manifest is None or not self.is_whole(manifest):
                return None
            return self._name(granted(manifest, teams), (version, reference))

    def _name(self, manifest: Manifest, names: Iterable[str]) -> Image:
        """Write a pulled version by its names, of which the last one is that of its tag.

        A tag that everyone may use keeps its version until everyone may use the new one. So a team
        with credentials takes no image away from others; it uses the name of the version.
        """
        image: Image | None = None
        for name in dict.fromkeys(map(canonical_name, names)):
            before = self._refs.get(name)
            if before is not None and before.digest == manifest.digest:
                manifest = granted(manifest, before.teams)
            if image is None or may_replace(before, manifest):
                image = self._write(structs.replace(manifest, name=name))
        if image is None:
            raise InvalidError("an image needs a name")
        return image

    def is_whole(self, manifest: Manifest) -> bool:
        """Whether the layers of an image are there; a power failure or a hand may remove them."""
        layers = (*manifest.layers, *filter(None, [manifest.accounts]))
        return all(self._layer_path(layer).is_dir() for layer in layers)

    def manifest(self, reference: str) -> Manifest | None:
        """Return the manifest of an image; `None` if there is no image of that name."""
        return self._refs.get(canonical_name(reference))

    def built_in_manifest(self, name: str) -> Manifest | None:
        """Return the manifest of `base` or `minimal`; `None` if it is not built."""
        recipe = base.BUILT_IN_NAMES.get(name)
        built = base.usable_directory(self._base_cache, name=recipe) if recipe else None
        return base.read_manifest(built) if built is not None else None

    def digest_of(self, reference: str) -> str:
        """Return the digest by which a registry has the image; empty: it was not pulled."""
        return manifest.digest if (manifest := self.manifest(reference)) is not None else ""

    def _import(
        self, blobs: Blobs, reference: str | None, wanted: str | None, budget: ImportBudget
    ) -> Image:
        bundle = read_bundle(blobs, wanted=wanted, machine=this_platform().architecture)
        name = canonical_name(reference) if reference else embedded_name(bundle)
        known = self._layers.names()
        return self._import_bundle(blobs, bundle, (name,), budget, known=known)

    def _import_bundle(
        self,
        blobs: Blobs,
        bundle: Bundle,
        names: Sequence[str],
        budget: ImportBudget,
        *,
        known: frozenset[str],
        origin: PulledFrom | None = None,
    ) -> Image:
        with self._layers.import_of(bundle) as running:
            layers: list[str] = []
            for blob, diff_id in zip(bundle.layers, bundle.diff_ids, strict=True):
                layer = layer_id(diff_id)
                if layer not in known or not self._layers.has(layer):
                    layer = self._layers.unpack(
                        blobs, blob, expected=diff_id, budget=budget, owner=running.id
                    )
                layers.append(layer)
            with self.keeping_layers():
                return self._save(names, tuple(layers), bundle.config, origin)

    def _save(
        self,
        names: Sequence[str],
        layers: tuple[str, ...],
        config: ImageConfig,
        origin: PulledFrom | None = None,
    ) -> Image:
        manifest = Manifest(
            name=names[0],
            layers=layers,
            config=config,
            created_at=self._clock.now().isoformat(),
            digest=origin.digest if origin is not None else "",
            teams=origin.teams if origin is not None else None,
            pulled_by=origin.team if origin is not None else "",
        )
        manifest = self._completed(decode_manifest(msgspec.json.encode(manifest), origin=names[0]))
        # A manifest on the disk says that its layers are there, also after a power failure.
        sync_tree(self._layers.path)
        with self._writing_refs():
            return self._name(manifest, names)

    def _completed(self, manifest: Manifest) -> Manifest:
        """Return the manifest with the facts of its files, and with the users it lacks."""
        plan = plan_accounts(MergedTree([self._layer_path(layer) for layer in manifest.layers]))
        if not plan.entries:
            return structs.replace(manifest, facts=plan.facts)
        if not self._layers.has(plan.layer_id):
            with self._layers.new() as fresh:
                write_layer(plan, fresh)
                self._layers.store(fresh, plan.layer_id)
        return structs.replace(manifest, facts=plan.facts, accounts=plan.layer_id)

    def _write(self, manifest: Manifest) -> Image:
        self._refs.put(manifest)
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
            digest=manifest.digest,
        )

    def known_name(self, reference: str) -> str:
        """Return the canonical name, or what it is an alias of; a stored image wins."""
        name = canonical_name(reference)
        return name if name in self._refs else _ALIASES.get(name, name)

    def _built_in(self, name: str) -> Image | None:
        """Return `base` or `minimal` as built on this machine."""
        if (image := self._built_in_images.get(name)) is not None:
            return image
        if (recipe := base.BUILT_IN_NAMES.get(name)) is None:
            return None
        if (built := base.usable_directory(self._base_cache, name=recipe)) is None:
            return None
        image = self._image(base.read_manifest(built))
        # An older build may be replaced any time.
        if built == base.base_directory(self._base_cache, name=recipe):
            self._built_in_images[name] = image
        return image

    def _layer_path(self, layer: str) -> Path:
        return Path(layer) if layer.startswith("/") else self._layers.path / layer

    def keeping_layers(self) -> contextlib.AbstractContextManager[None]:
        """Return a lock that blocks `collect`: until a manifest is written, or layers are read."""
        return self._layers.keeping()

    def _writing_refs(self) -> contextlib.AbstractContextManager[None]:
        """Return a lock for reading a manifest and writing it changed."""
        return locked(self._refs_lock, fcntl.LOCK_EX)
