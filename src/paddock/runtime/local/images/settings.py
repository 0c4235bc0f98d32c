"""What a node and the command line need to know about images."""

from msgspec import Struct

from paddock.runtime.local.images.limits import ImageLimits
from paddock.runtime.local.images.registry.settings import RegistrySettings

DOWNLOADS = "downloads"
"""Directory of downloads, in that of the images."""


class ImageSettings(Struct, frozen=True, kw_only=True):
    """Settings of the images of one node."""

    limits: ImageLimits = ImageLimits()
    registries: RegistrySettings = RegistrySettings()
    max_team_bytes: int = 0
    """Bytes of all images that were pulled for one team; 0: no limit."""
    evict_percent: int = 85
    """Share of the disk in use above which unneeded images are removed."""
