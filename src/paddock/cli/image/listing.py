"""`paddock image ls`: the images of this machine, and how many sandboxes use each."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from msgspec import structs

from paddock.runtime.local.images.model import ImageInfo, Manifest
from paddock.runtime.local.images.store import ImageStore
from paddock.runtime.local.node.records import StateDirectory


class ListedImage(ImageInfo, frozen=True, kw_only=True):
    """An image, and who uses it."""

    sandboxes: int
    """How many sandboxes of this machine have its layers, paused ones included."""

    @property
    def used_by(self) -> str:
        """The column `used by`."""
        if not self.sandboxes:
            return ""
        return "1 sandbox" if self.sandboxes == 1 else f"{self.sandboxes} sandboxes"


def listed_images(store: ImageStore, node: Path) -> tuple[ListedImage, ...]:
    """Return the images of a store with the counts of sandboxes of a node's state directory.

    A sandbox counts by its layers: for every name of its image, and not for a newer version of it.
    """
    counts = Counter(sandbox_layers(node))
    found: list[ListedImage] = []
    for item in store.images():
        manifest = store.manifest(item.name) or store.built_in_manifest(item.name)
        count = counts[_layers_of(manifest)] if manifest is not None else 0
        found.append(ListedImage(**structs.asdict(item), sandboxes=count))
    return tuple(found)


def sandbox_layers(node: Path) -> Iterable[tuple[str, ...]]:
    """Yield the layers of the image of each sandbox, highest first, as manifests name them."""
    directory = StateDirectory(node)
    if not directory.sandboxes.is_dir():
        return
    store = (node / "images" / "layers").absolute()
    for _, record in directory.read_all():
        if record is not None:
            # The first one has the programs of Paddock.
            paths = map(Path, record.layers[1:])
            yield tuple(path.name if path.parent == store else str(path) for path in paths)


def _layers_of(manifest: Manifest) -> tuple[str, ...]:
    return (*filter(None, [manifest.accounts]), *reversed(manifest.layers))
