"""`paddock image pull` and `push`: settings become a puller or a pusher of the operator."""

import asyncio

from paddock.cli.image.progress import layer_bars
from paddock.runtime.image_settings import image_settings
from paddock.runtime.local.images.registry.puller import PulledImage, Puller
from paddock.runtime.local.images.registry.pusher import PushedImage, Pusher
from paddock.runtime.local.images.settings import DOWNLOADS
from paddock.runtime.local.images.store import ImageStore
from paddock.runtime.local.storage.reserve import DiskReserve
from paddock.settings import Settings


def pull(settings: Settings, store: ImageStore, reference: str) -> PulledImage:
    """Pull an image as the operator, and show the progress of each layer."""
    root = settings.state / "node" / "images"
    reserve = DiskReserve(root, settings.disk_reserve_bytes)
    puller = Puller(store, root / DOWNLOADS, image_settings(settings).registries, reserve=reserve)
    with layer_bars() as show:
        return asyncio.run(puller.pull(reference, team=None, on_progress=show))


def push(settings: Settings, store: ImageStore, name: str, reference: str) -> PushedImage:
    """Push an image as the operator, and show the progress of each layer."""
    root = settings.state / "node" / "images"
    reserve = DiskReserve(root, settings.disk_reserve_bytes)
    pusher = Pusher(store, root / DOWNLOADS, image_settings(settings).registries, reserve=reserve)
    with layer_bars() as show:
        return asyncio.run(pusher.push(name, reference, on_progress=show))
