"""`paddock image pull`: settings become a puller; progress becomes bars, one per layer."""

import asyncio
from pathlib import Path

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TransferSpeedColumn,
)

from paddock.cli.output import notes
from paddock.runtime.local.images.registry.puller import LayerProgress, PulledImage, Puller
from paddock.runtime.local.images.registry.settings import (
    RegistrySettings,
    parse_hosts,
    parse_mirrors,
)
from paddock.runtime.local.images.store import ImageStore
from paddock.settings import Settings

_SHOWN_DIGITS = 12


def registry_settings(settings: Settings) -> RegistrySettings:
    """Return how registries are reached by this installation."""
    config = settings.registry_config
    return RegistrySettings(
        mirrors=parse_mirrors(settings.registry_mirrors),
        insecure=parse_hosts(settings.registry_plain_hosts),
        private=parse_hosts(settings.registry_private_hosts),
        docker_config=Path(config) if config else Path.home() / ".docker" / "config.json",
    )


def run(settings: Settings, store: ImageStore, reference: str) -> PulledImage:
    """Pull an image as the operator, and show the progress of each layer."""
    downloads = settings.state / "node" / "images" / "downloads"
    puller = Puller(store, downloads, registry_settings(settings))
    with _progress() as progress:
        bars: dict[str, TaskID] = {}

        def show(layer: LayerProgress) -> None:
            label = layer.digest.removeprefix("sha256:")[:_SHOWN_DIGITS]
            if layer.digest not in bars:
                bars[layer.digest] = progress.add_task(label, total=layer.total_bytes, state="")
            progress.update(bars[layer.digest], completed=layer.done_bytes, state=layer.state)

        return asyncio.run(puller.pull(reference, is_operator=True, on_progress=show))


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        DownloadColumn(),
        TransferSpeedColumn(),
        TextColumn("{task.fields[state]}"),
        console=notes,
        transient=True,
    )
