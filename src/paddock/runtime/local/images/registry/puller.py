"""Pull an image: resolve it, download its layers, unpack them into the image store.

Layers are downloaded side by side and unpacked in their order as they arrive. Nothing of an image
can be used before all of it is there: the store names it last. A pull that is interrupted keeps
what it downloaded, and the next one continues.
"""

import asyncio
import functools
import hashlib
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

from msgspec import Struct

from paddock.kit.errors import DiskFullError, InvalidError, NotFoundError
from paddock.runtime.local.images.archive import Bundle, LayerStoredError, bundle_of_config
from paddock.runtime.local.images.model import Image, PulledFrom
from paddock.runtime.local.images.registry.bodies import read_bounded
from paddock.runtime.local.images.registry.client import ManifestBytes, RegistryClient
from paddock.runtime.local.images.registry.credentials import operator_credentials
from paddock.runtime.local.images.registry.download import DownloadDirectory, remove_old
from paddock.runtime.local.images.registry.manifests import (
    Descriptor,
    choose_platform,
    decode_manifest,
    layers_of,
    this_platform,
)
from paddock.runtime.local.images.registry.reference import ImageReference, parse_reference
from paddock.runtime.local.images.registry.settings import RegistrySettings
from paddock.runtime.local.images.registry.team_share import PullShares
from paddock.runtime.local.images.store import ImageStore
from paddock.runtime.local.storage.reserve import DiskReserve
from paddock.runtime.port import RegistryCredentials

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

    def __init__(
        self,
        store: ImageStore,
        downloads: Path,
        settings: RegistrySettings,
        *,
        reserve: DiskReserve | None = None,
        shares: PullShares | None = None,
    ) -> None:
        """`shares` bounds what teams bring here; without it they are not bounded."""
        self._store = store
        self._directory = downloads
        self._settings = settings
        self._reserve = reserve
        self._shares = shares or PullShares(store, 0, lambda _team, _bytes: None)

    async def pull(
        self,
        text: str,
        *,
        team: str | None,
        credentials: RegistryCredentials | None = None,
        on_progress: OnProgress = lambda _: None,
    ) -> PulledImage:
        """Pull an image, unless the store has the one that the registry has now.

        `None` instead of a team stands for the operator. That allows what teams must not do: use
        the operator's credentials, and name a registry with a private address. See `access` for who
        may use the image afterwards.
        """
        reference = parse_reference(text)
        settings = self._settings
        if team is None:
            settings = settings.for_operator(reference.host)
            if credentials is None:
                credentials = await operator_credentials(settings.docker_config, reference.host)
        teams = (team,) if team is not None and credentials is not None else None
        async with RegistryClient(reference, settings, credentials) as client:
            top = await client.manifest(reference.wanted)
            version = reference.version(top.digest).name
            before = await asyncio.to_thread(self._store.digest_of, reference.name)
            name = version if reference.digest else reference.name
            image = await asyncio.to_thread(self._store.add_version, version, name, teams)
            if image is not None:
                return PulledImage(image=image, digest=top.digest, is_new=before != top.digest)
            config, layers = await self._contents(client, top, reference)
            names = tuple(layer.digest for layer in layers)
            bundle = bundle_of_config(await _config(client, config), names)
            downloads = await asyncio.to_thread(self._downloads, reference, credentials, team)
            known = await asyncio.to_thread(self._store.stored_layers, team)
            pull = _Pull(
                *(self._store, downloads, client, bundle, layers, team, known),
                self._reserve,
                on_progress,
            )
            await asyncio.to_thread(self._check_room, pull.missing, downloads, reference)
            async with self._shares.pull(team, reference.name) as share:
                await asyncio.to_thread(share.expect, sum(one.size for one in pull.missing))
                image = await pull.run(
                    (version,) if reference.digest else (version, reference.name),
                    PulledFrom(top.digest, teams, team or ""),
                    share.count,
                )
        return PulledImage(image=image, digest=top.digest, is_new=True)

    async def _contents(
        self, client: RegistryClient, top: ManifestBytes, reference: ImageReference
    ) -> tuple[Descriptor, tuple[Descriptor, ...]]:
        """Return the config and the layers of the image for this machine."""
        manifest = decode_manifest(top.data, reference.name)
        if manifest.manifests is not None:
            chosen = choose_platform(manifest, this_platform(), reference.name)
            data = (await client.manifest(chosen.digest)).data
            manifest = decode_manifest(data, reference.name)
        return layers_of(manifest, reference.name)

    def _downloads(
        self, reference: ImageReference, credentials: RegistryCredentials | None, team: str | None
    ) -> DownloadDirectory:
        """Return the directory of downloads of this host and, if it is not public, of this team.

        So nobody gets a download of others by its digest, and no server can interfere with the
        downloads from another one.
        """
        reader = "" if credentials is None else f"team {team}" if team is not None else "operator"
        scope = hashlib.sha256(f"{reference.host}\0{reader}".encode()).hexdigest()[:16]
        remove_old(self._directory)
        return DownloadDirectory(self._directory / scope)

    def _check_room(
        self,
        missing: tuple[Descriptor, ...],
        downloads: DownloadDirectory,
        reference: ImageReference,
    ) -> None:
        """Raise if the disk is too small for the layers, before anything is downloaded."""
        needed = sum(
            layer.size - downloads.bytes_of(layer) + layer.size * _UNPACKED_RATIO
            for layer in missing
        )
        if self._reserve is not None:
            self._reserve.ensure_room(f"pull image {reference.name}", needed)
        free = shutil.disk_usage(self._directory).free
        if needed > free:
            raise DiskFullError(
                f"image {reference.name} needs about {needed >> 20:,} MiB, and {self._directory} "
                f"has {free >> 20:,} MiB left",
                hint="delete images that are not used: paddock image prune",
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
        team: str | None,
        known: frozenset[str],
        reserve: DiskReserve | None,
        on_progress: OnProgress,
    ) -> None:
        """`known`: the layers that the store has and the team may use."""
        self._store = store
        self._downloads = downloads
        self._client = client
        self._bundle = bundle
        self._diff_ids = dict(zip(bundle.layers, bundle.diff_ids, strict=True))
        self._layers = {layer.digest: layer for layer in layers}
        self._team = team
        self._reserve = reserve
        self._known = known
        self._on_progress = on_progress
        self._loop = asyncio.get_running_loop()
        self._some = asyncio.Semaphore(_PARALLEL_DOWNLOADS)
        self._tasks: dict[str, asyncio.Task[IO[bytes] | None]] = {}
        self._is_ending = False

    @property
    def missing(self) -> tuple[Descriptor, ...]:
        """The layers that the store does not have."""
        return tuple(
            layer
            for layer in self._layers.values()
            if self._diff_ids[layer.digest] not in self._known
        )

    async def run(
        self, names: tuple[str, ...], origin: PulledFrom, on_bytes: Callable[[int], None]
    ) -> Image:
        """Download what is missing, and import the image. `on_bytes` counts what is unpacked."""
        missing = {layer.digest for layer in self.missing}
        for layer in self._layers.values():
            if layer.digest in missing:
                self._report(layer, "waiting", 0)
                self._start(layer)
            else:
                self._report(layer, "present", layer.size)
        # Unpacking waits for downloads in its thread: it must not be one of those that others need.
        own = ThreadPoolExecutor(1, thread_name_prefix="unpack")
        unpacking = asyncio.get_running_loop().run_in_executor(
            own,
            functools.partial(
                self._store.add_bundle,
                self,
                self._bundle,
                names,
                origin,
                known=self._known,
                on_bytes=on_bytes,
            ),
        )
        own.shutdown(wait=False)
        try:
            image = await asyncio.shield(unpacking)
        finally:
            await self._end_downloads()
            # After an error the thread ends with its next layer; until then it uses the store.
            await asyncio.wait({unpacking})
            if not unpacking.cancelled() and isinstance(unpacking.exception(), InvalidError):
                # The same bytes would be refused again. They may be damaged only here.
                for digest in missing:
                    await self._downloads.discard(digest)
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
        if self._is_ending:
            raise asyncio.CancelledError
        found = await (self._tasks.get(layer.digest) or self._start(layer))
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
                reserve=self._reserve,
            )
        self._report(layer, "downloaded", layer.size)
        return found

    async def _end_downloads(self) -> None:
        """Cancel what still runs, and close files that nobody has opened."""
        self._is_ending = True
        tasks = tuple(self._tasks.values())
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if result is not None and not isinstance(result, BaseException):
                result.close()

    async def _is_needed(self, digest: str) -> bool:
        """Whether no other pull has stored the layer meanwhile."""
        diff_id = self._diff_ids[digest]
        if not await asyncio.to_thread(self._store.has_layer, diff_id):
            return True
        return diff_id not in await asyncio.to_thread(self._store.stored_layers, self._team)

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
