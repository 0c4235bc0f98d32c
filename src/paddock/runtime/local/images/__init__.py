"""Images: the root file systems of sandboxes, stored once and shared by all sandboxes.

    store = ImageStore(state_dir / "images")
    image = store.resolve("base")            # Image(name, layers, config)
    overlay lowerdir = ":".join(map(str, image.lowerdirs))

An image is a manifest and ordered read-only directories (`model`). Images come from OCI layouts,
`docker save` and `podman save` archives (`archive`), plain directories and tars (`store`), or from
Debian packages (`base` and `minimal`, in `/var/cache/paddock/images/<name>-<hash>`; `debian` builds
them). `host` is the masked root of the host.

File owners in layers are those of the image (root is 0): sandboxes use idmapped mounts.
"""

from paddock.runtime.local.images.base import base_directory, build_base
from paddock.runtime.local.images.model import Image, ImageConfig, ImageInfo, canonical_name
from paddock.runtime.local.images.store import ImageStore

__all__ = [
    "Image",
    "ImageConfig",
    "ImageInfo",
    "ImageStore",
    "base_directory",
    "build_base",
    "canonical_name",
]
