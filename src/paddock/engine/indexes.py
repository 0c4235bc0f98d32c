"""Field indexes: finding objects by what they say, without looking at the others.

An index is a function from an object to the values under which it is found. Keeping an index
up to date costs as much as the object has values, however many objects there are.
Where the objects come from is `informer`'s business.
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
        """What can be asked for."""
        return tuple(self._buckets)

    def change(self, key: Key, old: R | None, new: R | None) -> None:
        """Follow one object from what it was to what it is; `None` is absence."""
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
        """Give the live collection of what has this value: valid until the next `await`."""
        bucket = self._index(name).get(value)
        return () if bucket is None else bucket.values()

    def values(self, name: str) -> Collection[Hashable]:
        """Give every value that some object has now: valid until the next `await`."""
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
