"""Field indexes: lookups by a value that is computed from an object.

An index is a function from an object to the values under which it is found. An update costs as
much as the object has values, regardless of the number of objects. `object_index` uses this.
"""

from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Generic, TypeAlias

from paddock.kit.errors import InvalidError
from paddock.resources.meta import Key, R

IndexFunction: TypeAlias = Callable[[R], tuple[Hashable, ...]]


class Indexes(Generic[R]):
    """All indexes of one kind."""

    def __init__(self, functions: Mapping[str, IndexFunction[R]]) -> None:
        self._buckets: dict[str, dict[Hashable, dict[Key, R]]] = {name: {} for name in functions}
        self._plan = tuple(
            (values_of, self._buckets[name]) for name, values_of in functions.items()
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the indexes."""
        return tuple(self._buckets)

    def change(self, key: Key, old: R | None, new: R | None) -> None:
        """Update the indexes for one object; `None` means absent."""
        for values_of, buckets in self._plan:
            was = () if old is None else values_of(old)
            now = () if new is None else values_of(new)
            if was and was != now:
                for value in was:
                    if value not in now:
                        _remove(buckets, value, key)
            if new is not None:
                for value in now:
                    bucket = buckets.get(value)
                    if bucket is None:
                        buckets[value] = {key: new}
                    else:
                        bucket[key] = new

    def view(self, name: str, value: Hashable) -> Collection[R]:
        """Return the live collection of objects with this value: valid until the next `await`."""
        bucket = self._index(name).get(value)
        return () if bucket is None else bucket.values()

    def values(self, name: str) -> Collection[Hashable]:
        """Return the live collection of values: valid until the next `await`."""
        return self._index(name).keys()

    def _index(self, name: str) -> dict[Hashable, dict[Key, R]]:
        try:
            return self._buckets[name]
        except KeyError:
            known = ", ".join(sorted(self._buckets)) or "none"
            raise InvalidError(f"there is no index {name!r}; known indexes: {known}") from None


def _remove(buckets: dict[Hashable, dict[Key, R]], value: Hashable, key: Key) -> None:
    bucket = buckets.get(value)
    if bucket is None:
        return
    bucket.pop(key, None)
    if not bucket:
        # An empty bucket would stay for ever where values are ids.
        del buckets[value]
