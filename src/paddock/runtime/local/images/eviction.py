"""Removes images that nobody needs when the disk becomes full, and layers that no image has.

Only images that were pulled are removed: they can be pulled again. The least recently used goes
first. Never removed are those that a template names and those that were used a moment ago. A layer
is removed after two sweeps, some time apart, have found it unused: a sandbox that is being created
is not recorded yet.
"""

import logging
import shutil
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from paddock.kit.clock import Clock
from paddock.kit.logs import fields
from paddock.resources.quantity import shown_bytes
from paddock.runtime.local.images.model import Manifest
from paddock.runtime.local.images.store import ImageStore

log = logging.getLogger(__name__)

_RECENT_SECONDS = 300.0
_LOW_SHARE = 0.05
"""How far below the threshold the disk is emptied, as a share of it."""


class ImageEviction:
    """Sweeps the images of one node."""

    def __init__(
        self,
        store: ImageStore,
        root: Path,
        clock: Clock,
        *,
        percent: int,
        names_of: Callable[[str], Iterable[str]],
    ) -> None:
        """`names_of` returns the names by which the store may have a reference."""
        self._store = store
        self._root = root
        self._clock = clock
        self._percent = percent
        self._names_of = names_of
        self._needed: frozenset[str] | None = None
        """The references of templates and sandboxes; `None`: not known yet."""
        self._suspects: frozenset[str] = frozenset()

    def need(self, references: Collection[str]) -> None:
        """Set which images templates and sandboxes name."""
        self._needed = frozenset(references)

    def sweep(self, in_use: Collection[Path]) -> tuple[str, ...]:
        """Remove what is needed no more; return the names of removed images."""
        excess = self._excess()
        unused = self._store.unused_layers(in_use)
        if excess > 0:
            # What earlier sweeps have evicted is still there, and goes with this one or the next.
            excess -= self._store.size_of(unused)
        removed = self.evict(excess, in_use) if excess > 0 else ()
        unused = self._store.unused_layers(in_use) if removed else unused
        gone = self._store.collect(in_use, only=self._suspects & unused)
        self._suspects = unused - frozenset(gone)
        if gone:
            log.info("layers removed", extra=fields(count=len(gone)))
        return removed

    def evict(
        self, wanted_bytes: int, in_use: Collection[Path] = (), *, team: str | None = None
    ) -> tuple[str, ...]:
        """Remove the names of images, least recently used first, until so much is free.

        Their layers are removed by later sweeps. With a team, only images that were pulled for it.
        """
        if self._needed is None:
            return ()
        manifests = [one for one in self._store.refs.all() if team in (None, one.pulled_by)]
        kept_layers = {path.name for path in in_use}
        removed: list[str] = []
        for manifest in self._candidates(manifests):
            if wanted_bytes <= 0:
                break
            manifests.remove(manifest)
            others = {layer for one in manifests for layer in one.layers} | kept_layers
            wanted_bytes -= self._store.size_of(set(manifest.layers) - others)
            self._store.refs.remove(manifest.name)
            removed.append(manifest.name)
            log.info("image evicted", extra=fields(image=manifest.name, digest=manifest.digest))
        return tuple(removed)

    def _candidates(self, manifests: Iterable[Manifest]) -> list[Manifest]:
        """Return images that may be removed, least recently used first."""
        needed = {name for one in self._needed or () for name in self._names_of(one)}
        refs, recent = self._store.refs, self._clock.now().timestamp() - _RECENT_SECONDS
        found = [
            manifest
            for manifest in manifests
            if manifest.digest
            and manifest.name not in needed
            and refs.last_used(manifest.name) < recent
        ]
        return sorted(found, key=lambda manifest: refs.last_used(manifest.name))

    def _excess(self) -> int:
        """Return the bytes to free; 0 if the disk is below the threshold."""
        disk = shutil.disk_usage(self._root)
        if disk.used <= disk.total * self._percent / 100:
            return 0
        excess = disk.used - int(disk.total * self._percent / 100 * (1 - _LOW_SHARE))
        log.info("disk is above the threshold of images", extra=fields(free=shown_bytes(disk.free)))
        return excess
