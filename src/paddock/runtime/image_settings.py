"""Reads the settings of images and registries, and passes them to the node."""

from pathlib import Path

import msgspec
from msgspec import structs

from paddock.kit import private_files
from paddock.runtime.local.images.limits import ImageLimits
from paddock.runtime.local.images.registry.settings import (
    RegistrySettings,
    parse_hosts,
    parse_mirrors,
)
from paddock.runtime.local.images.settings import ImageSettings
from paddock.settings import IMAGES_FILE, Settings


def image_settings(settings: Settings) -> ImageSettings:
    """Return the settings of images; with the operator's credentials."""
    config = settings.registry_config
    return ImageSettings(
        max_team_bytes=settings.image_max_team_bytes,
        evict_percent=settings.image_evict_percent,
        limits=ImageLimits(
            max_bytes=settings.image_max_bytes,
            max_entries=settings.image_max_entries,
            max_file_bytes=settings.image_max_file_bytes,
            max_ratio=settings.image_max_ratio,
        ),
        registries=RegistrySettings(
            mirrors=parse_mirrors(settings.registry_mirrors),
            insecure=parse_hosts(settings.registry_plain_hosts),
            private=parse_hosts(settings.registry_private_hosts),
            docker_config=Path(config) if config else Path.home() / ".docker" / "config.json",
        ),
    )


def node_file(settings: Settings) -> Path:
    """Return the file that passes these settings to the node: a mirror's URL may be secret."""
    return settings.run / IMAGES_FILE


def write_node_file(settings: Settings) -> None:
    """Write the file, readable by its owner only. The node pulls for teams, not the operator."""
    found = image_settings(settings)
    registries = structs.replace(found.registries, docker_config=None)
    given = structs.replace(found, registries=registries)
    private_files.replace(node_file(settings), msgspec.json.encode(given))
