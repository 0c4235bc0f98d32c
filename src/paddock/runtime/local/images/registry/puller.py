"""Pull an image: resolve it, download its layers, unpack them into the image store.

Layers are downloaded side by side and unpacked in their order as they arrive. Nothing of an image
can be used before all of it is there: the store names it last. A pull that is interrupted keeps
what it downloaded, and the next one continues.
"""

import asyncio
import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO

from msgspec import Struct, structs

from paddock.kit.errors import InvalidError, NotFoundError, UnavailableError
from paddock.runtime.local.images.archive import Bundle, LayerStoredError, bundle_of_config
from paddock.runtime.local.images.model import Image
from paddock.runtime.local.images.registry.bodies import read_bounded
from paddock.runtime.local.images.registry.client import RegistryClient
from paddock.runtime.local.images.registry.credentials import (
    RegistryCredentials,
    credentials_of,
    read_config,
)
from paddock.runtime.local.images.registry.download import DownloadDirectory
from paddock.runtime.local.images.registry.manifests import (
    Descriptor,
    choose_platform,
    decode_manifest,
    layers_of,
    this_platform,
)
from paddock.runtime.local.images.registry.reference import ImageReference, parse_reference
from paddock.runtime.local.images.registry.settings import RegistrySettings
from paddock.runtime.local.images.store import ImageStore

_MAX_CONFIG_BYTES = 8 << 20
_PARALLEL_DOWNLOADS = 3
_UNPACKED_RATIO = 3
"""Room that is expected for a byte of a compressed layer, until it is known."""


class LayerProgress(Struct, frozen=True, kw_only=True):
    """How far one layer of a pull is."""

    digest: str
    state: str
    """`waiting`, `downloading`, `downloaded`, `unpacking`, `present` or `unpacked`."""
    done_bytes: int
    total_bytes: int


OnProgress = Callable[[LayerProgress], None]


class PulledImage(Struct, frozen=True, kw_only=True):
    """The result of a pull."""

    image: Image
    digest: str
    """Of the manifest that the reference names: that of the index, if there is one."""
    is_new: bool


class Puller:
    """Pulls images of registries into one store."""

    def __init__(self, store: ImageStore, downloads: Path, settings: RegistrySettings) -> None:
        self._store = store
        self._downloads = DownloadDirectory(downloads)
        self._directory = downloads
        self._settings = settings

    async def pull(
        self,
        text: str,
        *,
        credentials: RegistryCredentials | None = None,
        is_operator: bool = False,
        on_progress: OnProgress = lambda _: None,
    ) -> PulledImage:
        """Pull an image, unless the store has the one that the registry has now.

        `is_operator` allows what tenants must not do: use the operator's credentials, and name a
        registry with a private address.
        """
        reference = parse_reference(text)
        self._downloads.remove_old()
        settings = self._settings
        if is_operator:
            settings = structs.replace(settings, private=settings.private | {reference.host})
            if credentials is None and settings.docker_config is not None:
                config = await asyncio.to_thread(read_config, settings.docker_config)
                credentials = await credentials_of(config, reference.host)
        async with RegistryClient(reference, settings, credentials) as client:
            top = await client.manifest(reference.wanted)
            if top.digest == self._store.digest_of(reference.name):
                image = await asyncio.to_thread(self._store.resolve, reference.name)
                return PulledImage(image=image, digest=top.digest, is_new=False)
            manifest = decode_manifest(top.data, reference.name)
            if manifest.manifests is not None:
                chosen = choose_platform(manifest, this_platform(), reference.name)
                data = (await client.manifest(chosen.digest)).data
                manifest = decode_manifest(data, reference.name)
            config, layers = layers_of(manifest, reference.name)
            names = tuple(layer.digest for layer in layers)
            bundle = bundle_of_config(await _config(client, config), names)
            pull = _Pull(self._store, self._downloads, client, bundle, layers, on_progress)
            self._check_room(pull.missing, reference)
            image = await pull.run(reference.name, top.digest)
        return PulledImage(image=image, digest=top.digest, is_new=True)

    def _check_room(self, missing: tuple[Descriptor, ...], reference: ImageReference) -> None:
        """Raise if the disk is too small for the layers, before anything is downloaded."""
        free = shutil.disk_usage(self._directory).free
        needed = sum(
            layer.size - self._downloads.bytes_of(layer) + layer.size * _UNPACKED_RATIO
            for layer in missing
        )
        if needed > free:
            raise UnavailableError(
                f"image {reference.name} needs about {needed >> 20:,} MiB, and {self._directory} "
                f"has {free >> 20:,} MiB left",
                hint="delete images that are not used: paddock image rm",
            )


class _Pull:
    """The download and the import of one image. `open` is called by the thread that unpacks."""

    def __init__(
        self,
        store: ImageStore,
        downloads: DownloadDirectory,
        client: RegistryClient,
        bundle: Bundle,
        layers: tuple[Descriptor, ...],
        on_progress: OnProgress,
    ) -> None:
        self._store = store
        self._downloads = downloads
        self._client = client
        self._bundle = bundle
        self._diff_ids = dict(zip(bundle.layers, bundle.diff_ids, strict=True))
        self._layers = {layer.digest: layer for layer in layers}
        self._on_progress = on_progress
        self._loop = asyncio.get_running_loop()
        self._some = asyncio.Semaphore(_PARALLEL_DOWNLOADS)
        self._tasks: dict[str, asyncio.Task[IO[bytes] | None]] = {}

    @property
    def missing(self) -> tuple[Descriptor, ...]:
        """The layers that the store does not have."""
        return tuple(layer for layer in self._layers.values() if self._is_needed(layer.digest))

    async def run(self, name: str, digest: str) -> Image:
        """Download what is missing, and import the image."""
        missing = {layer.digest for layer in self.missing}
        for layer in self._layers.values():
            if layer.digest in missing:
                self._report(layer, "waiting", 0)
                self._start(layer)
            else:
                self._report(layer, "present", layer.size)
        packed = sum(layer.size for layer in self._layers.values())
        unpacking = asyncio.create_task(
            asyncio.to_thread(
                self._store.add_bundle,
                self,
                self._bundle,
                name,
                packed_bytes=packed,
                digest=digest,
            )
        )
        try:
            image = await asyncio.shield(unpacking)
        finally:
            await self._end_downloads()
            # After an error the thread ends with its next layer; until then it uses the store.
            await asyncio.wait({unpacking})
        for layer in self._layers.values():
            await self._downloads.remove(layer.digest)
            self._report(layer, "unpacked" if layer.digest in missing else "present", layer.size)
        return image

    def open(self, name: str) -> IO[bytes]:
        """Open a layer, once it is downloaded. Each layer is opened once."""
        layer = self._layers[name]
        found = asyncio.run_coroutine_threadsafe(self._wait_for(layer), self._loop).result()
        self._loop.call_soon_threadsafe(self._report, layer, "unpacking", layer.size)
        return found

    def read(self, name: str) -> bytes:
        raise NotFoundError(f"there is no {name!r}")

    def has(self, name: str) -> bool:
        return name in self._layers

    async def _wait_for(self, layer: Descriptor) -> IO[bytes]:
        found = await (self._tasks.pop(layer.digest, None) or self._start(layer))
        self._tasks.pop(layer.digest, None)
        if found is None:
            raise LayerStoredError
        return found

    def _start(self, layer: Descriptor) -> asyncio.Task[IO[bytes] | None]:
        self._tasks[layer.digest] = asyncio.create_task(self._download(layer))
        return self._tasks[layer.digest]

    async def _download(self, layer: Descriptor) -> IO[bytes] | None:
        async with self._some:
            found = await self._downloads.fetch(
                self._client,
                layer,
                is_needed=lambda: self._is_needed(layer.digest),
                on_bytes=lambda done: self._report(layer, "downloading", done),
            )
        self._report(layer, "downloaded", layer.size)
        return found

    async def _end_downloads(self) -> None:
        """Cancel what still runs, and close files that nobody has opened."""
        tasks = tuple(self._tasks.values())
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if result is not None and not isinstance(result, BaseException):
                result.close()

    def _is_needed(self, digest: str) -> bool:
        return not self._store.has_layer(self._diff_ids[digest])

    def _report(self, layer: Descriptor, state: str, done: int) -> None:
        self._on_progress(
            LayerProgress(digest=layer.digest, state=state, done_bytes=done, total_bytes=layer.size)
        )


async def _config(client: RegistryClient, descriptor: Descriptor) -> bytes:
    """Return the config of an image, verified."""
    async with client.blob(descriptor.digest) as response:
        data = await read_bounded(response, _MAX_CONFIG_BYTES)
    if f"sha256:{hashlib.sha256(data).hexdigest()}" != descriptor.digest:
        raise InvalidError("the registry sent a config with another digest than the manifest's")
    return data
