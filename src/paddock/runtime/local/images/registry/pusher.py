"""Push an image of the store to a registry: pack its layers, upload what the registry lacks.

The store has unpacked layers, so each is packed again, into a file without a name, one after the
other. Packing is deterministic: what was pushed before has the same digest and is not sent again.
The manifest is sent last, so a push that is interrupted changes no tag.
"""

import asyncio
import hashlib
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import IO

import msgspec
from msgspec import Struct

from paddock.kit.errors import InvalidError, NotFoundError, UnavailableError
from paddock.runtime.local.images import base
from paddock.runtime.local.images.model import Image, ImageConfig
from paddock.runtime.local.images.registry.client import RegistryClient, RequestBody
from paddock.runtime.local.images.registry.credentials import operator_credentials
from paddock.runtime.local.images.registry.manifests import this_platform
from paddock.runtime.local.images.registry.pack import PackedLayer, pack_layer
from paddock.runtime.local.images.registry.puller import LayerProgress, OnProgress
from paddock.runtime.local.images.registry.reference import ImageReference, parse_reference
from paddock.runtime.local.images.registry.settings import RegistrySettings
from paddock.runtime.local.images.rootfs import disk_use
from paddock.runtime.local.images.store import ImageStore
from paddock.runtime.local.storage.reserve import DiskReserve

_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
_BLOB = "application/octet-stream"
_CHUNK = 1 << 20
_RESERVE_STEP_BYTES = 64 << 20
"""How often the space of the disk is checked."""
_BACKOFF_SECONDS = (0.5, 2.0, 5.0)
"""Before a blob is sent again whose upload was interrupted."""


class PushedImage(Struct, frozen=True, kw_only=True):
    """The result of a push."""

    name: str
    """The reference by which the registry has it."""
    digest: str
    """Of its manifest."""
    sent_bytes: int
    """What the registry did not have."""


class Pusher:
    """Pushes images of one store, as the operator."""

    def __init__(
        self,
        store: ImageStore,
        scratch: Path,
        settings: RegistrySettings,
        *,
        reserve: DiskReserve | None = None,
    ) -> None:
        self._store = store
        self._scratch = scratch
        self._settings = settings
        self._reserve = reserve

    async def push(
        self, name: str, text: str, *, on_progress: OnProgress = lambda _: None
    ) -> PushedImage:
        """Push a stored image under a reference with a tag."""
        reference = parse_reference(text)
        if reference.digest:
            raise InvalidError(
                f"{text[:300]!r} names a digest, which the registry computes",
                hint="push to a tag, such as registry.example/tools:1",
            )
        image = await asyncio.to_thread(self._store.resolve, name)
        settings = self._settings.for_operator(reference.host)
        credentials = await operator_credentials(settings.docker_config, reference.host)
        with self._store.keeping_layers():
            async with RegistryClient(reference, settings, credentials) as client:
                push = _Push(client, reference, self._scratch, self._reserve, on_progress)
                return await push.run(image, self._created_at(name))

    def _created_at(self, name: str) -> str:
        known = self._store.known_name(name)
        manifest = self._store.manifest(known) or self._store.built_in_manifest(known)
        if manifest is None:
            raise NotFoundError(f"there is no image {known}", hint=base.missing_hint(known))
        return manifest.created_at


class _Push:
    """The push of one image."""

    def __init__(
        self,
        client: RegistryClient,
        reference: ImageReference,
        scratch: Path,
        reserve: DiskReserve | None,
        on_progress: OnProgress,
    ) -> None:
        self._client = client
        self._reference = reference
        self._scratch = scratch
        self._reserve = reserve
        self._on_progress = on_progress
        self._loop = asyncio.get_running_loop()
        self._is_ending = False
        self._sent = 0

    async def run(self, image: Image, created_at: str) -> PushedImage:
        """Send the layers, the config, then the manifest."""
        self._scratch.mkdir(parents=True, exist_ok=True, mode=0o700)
        sizes = {path: await asyncio.to_thread(disk_use, path) for path in image.layers}
        for path, size in sizes.items():
            self._report(path, "waiting", 0, size)
        packed = {path: await self._layer(path, size) for path, size in sizes.items()}
        layers = [packed[path] for path in image.layers]
        config = config_blob(image.config, [layer.diff_id for layer in layers], created_at)
        config_digest = digest_of(config)
        if not await self._has(config_digest):
            await self._upload(config_digest, len(config), lambda: _pieces(config))
        manifest = manifest_blob(config, layers)
        body = RequestBody(
            size=len(manifest), media_type=_MANIFEST, chunks=lambda: _pieces(manifest)
        )
        async with self._client.push("PUT", f"manifests/{self._reference.tag}", body):
            pass
        return PushedImage(
            name=self._reference.name, digest=digest_of(manifest), sent_bytes=self._sent
        )

    async def _layer(self, path: Path, size: int) -> PackedLayer:
        with tempfile.TemporaryFile(dir=self._scratch) as file:
            packed = await self._pack(path, file, size)
            if await self._has(packed.digest):
                self._report(path, "present", packed.size, packed.size)
                return packed

            def chunks() -> AsyncIterator[bytes]:
                return _read(
                    file.fileno(), lambda done: self._report(path, "uploading", done, packed.size)
                )

            await self._upload(packed.digest, packed.size, chunks)
            self._report(path, "uploaded", packed.size, packed.size)
            return packed

    async def _pack(self, path: Path, file: IO[bytes], size: int) -> PackedLayer:
        """Pack a layer in a thread, which ends soon after this call is cancelled."""
        checked = shown = 0

        def read(done: int) -> None:
            nonlocal shown
            if self._is_ending:
                raise InvalidError("the push was cancelled")
            if done - shown < _CHUNK:
                return
            shown = done
            self._loop.call_soon_threadsafe(
                self._report, path, "packing", min(done, size), max(size, 1)
            )

        def written(done: int) -> None:
            nonlocal checked
            if self._reserve is not None and done - checked >= _RESERVE_STEP_BYTES:
                checked = done
                self._reserve.ensure_room(f"pack {path.name[:19]}")

        packing = asyncio.create_task(
            asyncio.to_thread(pack_layer, path, file, on_read=read, on_written=written)
        )
        try:
            packed = await asyncio.shield(packing)
        finally:
            self._is_ending = not packing.done()
            await asyncio.wait({packing})
        file.flush()
        return packed

    async def _has(self, digest: str) -> bool:
        try:
            async with self._client.push("HEAD", f"blobs/{digest}"):
                return True
        except NotFoundError:
            return False

    async def _upload(
        self, digest: str, size: int, chunks: Callable[[], AsyncIterator[bytes]]
    ) -> None:
        """Send a blob; again from its beginning if the connection breaks."""
        body = RequestBody(size=size, media_type=_BLOB, chunks=chunks)
        for delay in (*_BACKOFF_SECONDS, None):
            try:
                await self._attempt(digest, body)
                break
            except UnavailableError:
                if delay is None:
                    raise
                await asyncio.sleep(delay)
        self._sent += size

    async def _attempt(self, digest: str, body: RequestBody) -> None:
        async with self._client.push("POST", "blobs/uploads/") as response:
            location = response.headers.get("Location", "")
        if not location:
            raise InvalidError(
                f"the registry of {self._reference.name} does not say where to upload to"
            )
        separator = "&" if "?" in location else "?"
        async with self._client.push("PUT", f"{location}{separator}digest={digest}", body):
            pass

    def _report(self, path: Path, state: str, done: int, total: int) -> None:
        name = path.name.replace("sha256-", "sha256:")
        self._on_progress(
            LayerProgress(digest=name, state=state, done_bytes=done, total_bytes=total)
        )


def config_blob(config: ImageConfig, diff_ids: Sequence[str], created_at: str) -> bytes:
    """Return the config of an image, as the OCI image specification defines it."""
    platform = this_platform()
    container = {
        "Env": [f"{key}={value}" for key, value in config.env.items()],
        "User": config.user,
        "WorkingDir": config.workdir,
        "Entrypoint": config.entrypoint,
        "Cmd": config.cmd,
    }
    document = {
        **({"created": created_at} if created_at else {}),
        "architecture": platform.architecture,
        "os": platform.os,
        "config": {key: value for key, value in container.items() if value},
        "rootfs": {"type": "layers", "diff_ids": diff_ids},
    }
    return msgspec.json.encode(document)


def manifest_blob(config: bytes, layers: Sequence[PackedLayer]) -> bytes:
    """Return the manifest of an image."""
    document = {
        "schemaVersion": 2,
        "mediaType": _MANIFEST,
        "config": {"mediaType": _CONFIG, "digest": digest_of(config), "size": len(config)},
        "layers": [
            {"mediaType": _LAYER, "digest": layer.digest, "size": layer.size} for layer in layers
        ],
    }
    return msgspec.json.encode(document)


def digest_of(data: bytes) -> str:
    """Return the digest by which a registry has a blob."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


async def _pieces(data: bytes) -> AsyncIterator[bytes]:
    yield data


async def _read(descriptor: int, on_bytes: Callable[[int], None]) -> AsyncIterator[bytes]:
    done = 0
    while data := await asyncio.to_thread(os.pread, descriptor, _CHUNK, done):
        yield data
        done += len(data)
        on_bytes(done)
