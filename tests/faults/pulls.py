"""A pull of an image that stops at a point, and what a killed node has of the image."""

import asyncio
import contextlib
from pathlib import Path

from paddock.runtime.local.driver import LocalRuntime
from paddock.runtime.local.images.store import ImageStore
from tests.installation import Installation
from tests.runtime.local.images.registry.relay import Held, Relay
from tests.runtime.local.images.registry.small_images import CHECK, SmallImage
from tests.runtime.local.nodes import eventually

API = "/apis/paddock.dev/v1alpha1/namespaces/default"
POINTS = ("manifest", "first layer", "second layer", "unpacking")
"""Where a pull is when the node is killed. A further one waits for its turn."""


class Pull:
    """The pull of one image for the pool of its name."""

    def __init__(self, paddock: Installation, relay: Relay, image: SmallImage, point: str) -> None:
        self.image = image
        self.point = point
        self._paddock = paddock
        self._relay = relay
        self._images = paddock.node_state / "images"
        self._kept: list[int | None] = []
        """Bytes of each layer that the node had when it was killed; `None`: all."""
        self._before: list[int] = []
        """Requests of each layer before that."""
        first, second = image.layers
        held = {
            "manifest": (f"/v2/{image.repository}/manifests/", 0),
            "first layer": (image.blob_path(0), first.size // 2),
            "second layer": (image.blob_path(1), second.size // 2),
            "unpacking": (image.blob_path(1), 0),
        }
        path, after = held.get(point, ("", 0))
        self.held: Held | None = relay.hold(path, after=after) if path else None

    @property
    def reference(self) -> str:
        return f"{self._relay.host}/{self.image.name}"

    async def begin(self) -> None:
        """Create a pool of one sandbox of the image."""
        body = {
            "apiVersion": "paddock.dev/v1alpha1",
            "kind": "SandboxPool",
            "metadata": {"name": self.image.repository},
            "spec": {"template": {"image": self.reference}, "replicas": 1},
        }
        await self._paddock.kube("POST", f"{API}/sandboxpools", body)

    async def is_held(self) -> None:
        """Wait until the pull is at its point, or waits for its turn."""
        if self.held is None:
            await eventually(self._waits, seconds=60)
            return
        async with asyncio.timeout(60):
            await self.held.reached.wait()
        if self.point in ("first layer", "second layer"):
            number = POINTS.index(self.point) - 1
            await eventually(lambda: self._part(number) >= self.held_bytes, seconds=60)
            await eventually(lambda: all(map(self._requested, (0, 1))), seconds=60)
        if self.point in ("second layer", "unpacking"):
            await eventually(self._layer(0).is_dir, seconds=60)

    async def goes_to_its_point(self) -> None:
        """Let the pull reach a point at which the relay cannot hold it."""
        if self.point == "unpacking":
            self.release()
            await eventually(self._is_unpacking, seconds=60, pause=0.001)

    def release(self) -> None:
        """Let the registry send the rest."""
        assert self.held is not None
        self.held.release.set()

    @property
    def held_bytes(self) -> int:
        """Bytes that were sent for sure before the relay stopped, less what a socket buffers."""
        return self.held.after // 2 if self.held is not None else 0

    def is_usable(self) -> bool:
        """Whether the node has the image; an incomplete one fails the test."""
        store = ImageStore(self._images)
        for number, blob in enumerate(self.image.layers):
            layer = self._layer(number)
            if number and layer.is_dir():
                assert len(list((layer / "data/many").iterdir())) == self.image.files, blob
        if not store.has(self.reference):
            return False
        store.resolve(self.reference)  # raises if it lacks a layer
        return True

    async def runs(self) -> None:
        """Wait until the pool has its sandbox, and check what is in it."""
        name = self.image.repository

        async def is_stocked() -> bool:
            pool = await self._paddock.kube("GET", f"{API}/sandboxpools/{name}")
            return pool.get("status", {}).get("available", 0) == 1

        try:
            await eventually(is_stocked, seconds=120, pause=0.1)
        except AssertionError as error:
            error.add_note(f"{name}\n{self._paddock.log('node')[-3000:]}")
            raise
        box = await self._paddock.create(templateID=name, timeout=60)
        assert await self._paddock.run(box, CHECK) == self.image.prints
        await self._paddock.api("DELETE", f"/sandboxes/{box.id}")
        await self._paddock.kube("DELETE", f"{API}/sandboxpools/{name}")

    def note_kill(self) -> None:
        """Record what the killed node has of each layer."""
        for number in (0, 1):
            is_complete = self._download(number).exists() or self.is_usable()
            self._kept.append(None if is_complete else self._part(number))
            self._before.append(len(self._requested(number)))

    def continued(self) -> None:
        """Check that nothing was downloaded twice."""
        for number in (0, 1):
            ranges = self._requested(number)
            kept, later = self._kept[number], ranges[self._before[number] :]
            # Complete: also one whose last byte is written and which has not got its name yet.
            is_complete = kept is None or kept == self.image.layers[number].size
            first = [f"bytes={kept}-" if kept else ""]
            assert later == ([] if is_complete else first), (self.point, number, kept, ranges)

    def _requested(self, number: int) -> list[str]:
        """Return the ranges of all requests for a layer."""
        return self._relay.ranges_of(self.image.blob_path(number))

    def _layer(self, number: int) -> Path:
        return self._images / "layers" / self.image.layers[number].layer

    def _download(self, number: int) -> Path:
        """Return the file of a complete download; it may not exist."""
        digest = self.image.layers[number].digest.removeprefix("sha256:")
        found = list((self._images / "downloads").glob(f"*/{digest}"))
        return found[0] if found else self._images / "downloads" / digest

    def _part(self, number: int) -> int:
        """Return how much of a layer is in its file."""
        digest = self.image.layers[number].digest.removeprefix("sha256:")
        for part in (self._images / "downloads").glob(f"*/{digest}.part"):
            with contextlib.suppress(FileNotFoundError):
                return part.stat().st_size
        return 0

    def _is_unpacking(self) -> bool:
        for directory in (self._images / "layers").glob(".new-*"):
            with contextlib.suppress(FileNotFoundError):
                if any(directory.iterdir()):
                    return True
        return self._layer(1).is_dir()

    async def _waits(self) -> bool:
        node = LocalRuntime(self._paddock.directory / "run" / "node.sock")
        try:
            pulls = await node.image_pulls()
        finally:
            node.close()
        return any(pull.reference == self.reference and pull.is_waiting for pull in pulls)
