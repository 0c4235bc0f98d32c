"""The reading half of the Store port, for code that must not write."""

from typing import Protocol

from paddock.resources.meta import Key, R
from paddock.resources.selectors import FieldSelector, LabelSelector
from paddock.store.port import Page


class Reader(Protocol):
    """Reads resources from the store, without a cache."""

    async def get(self, kind: type[R], key: Key) -> R:
        """Read one; `NotFoundError`."""
        ...

    async def list(
        self,
        kind: type[R],
        *,
        namespace: str | None = None,
        labels: LabelSelector | None = None,
        fields: FieldSelector | None = None,
        limit: int | None = None,
        continue_token: str = "",
    ) -> Page[R]:
        """Read many."""
        ...
