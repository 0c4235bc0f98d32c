"""Bounds what pulls of one team bring to a node.

A team counts for each layer of the images that were pulled for it, once, also if others use them:
so nobody gets images for nothing by letting another one pull them first, and nothing is to be moved
when one is removed. Images of the operator count for nobody. Beyond the share, images of the team
that nobody needs are removed, least recently used first; then pulls are refused.
"""

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Callable

from paddock.kit.errors import QuotaExceededError
from paddock.resources.quantity import shown_bytes
from paddock.runtime.local.images.store import ImageStore

MakeRoom = Callable[[str, int], object]
"""Removes images of a team until so many bytes are free, if they are not needed."""


class PullShares:
    """The shares of all teams on one node. All but `pull` blocks on the disk."""

    def __init__(self, store: ImageStore, limit_bytes: int, make_room: MakeRoom) -> None:
        """`limit_bytes` of each team; 0: no limit."""
        self._store = store
        self._limit = limit_bytes
        self._make_room = make_room
        self._lock = threading.Lock()
        self._sizes: dict[str, int] = {}
        self._stored: dict[str, int] = {}
        self._pulling: Counter[str] = Counter()
        """Bytes that pulls in progress have unpacked."""

    def stored_bytes(self, team: str) -> int:
        """Return the bytes of all layers that were pulled for a team."""
        manifests = self._store.refs.all()
        layers = {one for item in manifests if item.pulled_by == team for one in item.layers}
        return sum(map(self._size_of, layers))

    def _size_of(self, layer: str) -> int:
        """Return the bytes of a layer, which never change."""
        if (size := self._sizes.get(layer)) is None:
            size = self._sizes[layer] = self._store.size_of((layer,))
        return size

    @contextlib.asynccontextmanager
    async def pull(self, team: str | None, image: str) -> AsyncGenerator["TeamPull"]:
        """Count one pull until its image is stored. `None` is the operator, who has no limit."""
        counted = TeamPull(self, (team or "") if self._limit else "", image)
        try:
            yield counted
        finally:
            if counted.team:
                await asyncio.to_thread(self._end, counted.team, counted.size_bytes)

    def _end(self, team: str, size: int) -> None:
        stored = self.stored_bytes(team)
        with self._lock:
            self._stored[team] = stored
            self._pulling[team] -= size

    def add(self, team: str, image: str, new_bytes: int, expected_bytes: int = 0) -> None:
        """Count unpacked bytes; `QuotaExceededError` if these or the expected ones are too many."""
        with self._lock:
            self._pulling[team] += new_bytes
            excess = self._excess(team, expected_bytes)
        if excess <= 0:
            return
        self._make_room(team, excess)
        stored = self.stored_bytes(team)
        with self._lock:
            self._stored[team] = stored
            excess = self._excess(team, expected_bytes)
        if excess > 0:
            raise QuotaExceededError(
                f"image {image} is not pulled: with it, the images that were pulled for team "
                f"'{team}' have more than {shown_bytes(self._limit)} on this machine",
                hint="delete templates whose images are not needed, or ask an operator to raise "
                "the setting image_max_team_bytes",
            )

    def _excess(self, team: str, expected_bytes: int) -> int:
        if team not in self._stored:
            self._stored[team] = self.stored_bytes(team)
        return self._stored[team] + self._pulling[team] + expected_bytes - self._limit


class TeamPull:
    """Counts one pull."""

    def __init__(self, shares: PullShares, team: str, image: str) -> None:
        """An empty team is not limited."""
        self._shares = shares
        self.team = team
        self._image = image
        self.size_bytes = 0
        """What was unpacked so far."""

    def expect(self, packed_bytes: int) -> None:
        """Raise `QuotaExceededError` if not even the packed layers fit."""
        if self.team:
            self._shares.add(self.team, self._image, 0, packed_bytes)

    def count(self, size: int) -> None:
        """Count unpacked bytes; `QuotaExceededError` if the share is used up."""
        if self.team:
            self.size_bytes += size
            self._shares.add(self.team, self._image, size)
