"""The directory of layers: unpacking, what is being imported, and removal of what is unused.

<root>/layers/<id>/      complete layers
<root>/layers/.new-*     being unpacked
<root>/imports/          what running imports need; see `imports`
<root>/lock              shared: layers are kept; exclusive: unused ones are removed
"""

import contextlib
import fcntl
import os
import shutil
import uuid
from collections.abc import Collection, Generator
from pathlib import Path
from typing import IO, cast

from paddock.kit.errors import InvalidError, NotFoundError, UnavailableError
from paddock.runtime.local.images.archive import (
    Blobs,
    Bundle,
    HashingReader,
    LayerStoredError,
    open_layer,
)
from paddock.runtime.local.images.layers.imports import RunningImport, RunningImports
from paddock.runtime.local.images.limits import ImportBudget
from paddock.runtime.local.images.model import layer_id
from paddock.runtime.local.images.unpack import unpack_layer

_TEMPORARY = ".new-"


class LayerDirectory:
    """The layers of one store."""

    def __init__(self, root: Path) -> None:
        self.path = root / "layers"
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = root / "lock"
        self._imports = RunningImports(root / "imports")

    def names(self) -> frozenset[str]:
        """Return the names of all layers, and of beginnings of layers."""
        return frozenset(os.listdir(self.path))

    def has(self, layer: str) -> bool:
        """Whether a layer is stored."""
        return (self.path / layer).is_dir()

    def importing(self, layers: Collection[str]) -> frozenset[str]:
        """Return those of the layers that running imports need."""
        return self._imports.needed(layers, _TEMPORARY)

    def keeping(self) -> contextlib.AbstractContextManager[None]:
        """Return a lock that blocks the removal of layers."""
        return locked(self._lock, fcntl.LOCK_SH)

    @contextlib.contextmanager
    def removing(self) -> Generator[bool, None, None]:
        """Hold the lock that removes layers; yield False if layers are being kept."""
        with self._lock.open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True

    @contextlib.contextmanager
    def import_of(self, bundle: Bundle) -> Generator[RunningImport, None, None]:
        """Keep the layers of an image until the end of the block."""
        with self.keeping():
            running = self._imports.begin(map(layer_id, bundle.diff_ids))
        try:
            yield running
        finally:
            running.end()

    def unpack(
        self, blobs: Blobs, blob: str, *, expected: str | None, budget: ImportBudget, owner: str
    ) -> str:
        """Unpack a layer of an archive, with this checksum, and return its id.

        `owner` is the running import that it is for; without one the caller holds `keeping`.
        """
        try:
            return self._unpack_blob(blobs, blob, expected=expected, budget=budget, owner=owner)
        except LayerStoredError:
            # Another import was faster.
            if not (self.path / (layer := layer_id(expected or ""))).is_dir():
                raise UnavailableError(f"layer {blob} was removed during the import") from None
            return layer

    def _unpack_blob(
        self, blobs: Blobs, blob: str, *, expected: str | None, budget: ImportBudget, owner: str
    ) -> str:
        # Opened first: that may take as long as a download.
        with open_layer(blobs, blob) as stream, self.new(owner) as fresh:
            hashing = HashingReader(stream, budget)
            unpack_layer(cast("IO[bytes]", hashing), fresh, budget)
            if expected is not None and hashing.digest != expected:
                raise InvalidError(
                    f"layer {blob} is damaged: its checksum is {hashing.digest}, not {expected}"
                )
            return self.store(fresh, layer_id(hashing.digest))

    @contextlib.contextmanager
    def new(self, owner: str = "") -> Generator[Path, None, None]:
        """Yield a temporary directory; it is removed unless it was renamed.

        `owner` is a running import; other callers hold the lock of `keeping`.
        """
        fresh = self.path / f"{_TEMPORARY}{owner}{uuid.uuid4().hex}"
        fresh.mkdir(mode=0o755)
        try:
            yield fresh
        finally:
            shutil.rmtree(fresh, ignore_errors=True)

    def store(self, fresh: Path, name: str) -> str:
        """Rename a new layer to its id, unless another import was faster."""
        with contextlib.suppress(OSError):
            fresh.rename(self.path / name)
        if not (self.path / name).is_dir():
            raise NotFoundError(f"the layer {name} could not be stored")
        return name


@contextlib.contextmanager
def locked(path: Path, how: int) -> Generator[None, None, None]:
    """Hold the lock of a file, against other threads and processes."""
    with path.open("w") as lock:
        fcntl.flock(lock, how)
        yield


class CountedBlobs:
    """Blobs of a registry, counted as packed bytes when they are opened.

    The manifest is not believed: nobody verifies the sizes of layers that are not downloaded.
    """

    def __init__(self, blobs: Blobs, budget: ImportBudget) -> None:
        self._blobs = blobs
        self._budget = budget

    def read(self, name: str) -> bytes:
        return self._blobs.read(name)

    def open(self, name: str) -> IO[bytes]:
        stream = self._blobs.open(name)
        self._budget.add_packed(os.fstat(stream.fileno()).st_size)
        return stream

    def has(self, name: str) -> bool:
        return self._blobs.has(name)
