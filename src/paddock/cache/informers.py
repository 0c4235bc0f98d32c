"""The informers of a cache: they start, sync and fail together."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from paddock.cache.indexes import functions_for
from paddock.engine.informer import Filter, Informer
from paddock.kit.clock import Clock
from paddock.kit.errors import InvalidError, UnavailableError
from paddock.resources.meta import Resource
from paddock.store.port import Store

R = TypeVar("R", bound=Resource)

Transforms = Mapping[type[Resource], Callable[[Any], Any]]
Filters = Mapping[type[Resource], Filter]


class Informers:
    """One informer per kind."""

    def __init__(
        self,
        store: Store,
        kinds: Iterable[type[Resource]],
        *,
        filters: Filters,
        transforms: Transforms,
        clock: Clock,
    ) -> None:
        self._by_kind: dict[type[Resource], Informer[Any]] = {
            kind: Informer(
                store,
                kind,
                indexes=functions_for(kind),
                only=filters.get(kind),
                transform=transforms.get(kind),
                clock=clock,
            )
            for kind in kinds
        }
        self._is_serving = False

    def get(self, kind: type[R]) -> Informer[R] | None:
        """Return the informer of a kind, or `None` if this cache does not have it."""
        return self._by_kind.get(kind)

    def of(self, kind: type[R]) -> Informer[R]:
        """Return the informer of a kind; `InvalidError` if this cache does not have it."""
        informer = self._by_kind.get(kind)
        if informer is None:
            known = ", ".join(item.KIND for item in self._by_kind)
            raise InvalidError(f"this cache does not hold {kind.KIND}; it holds {known}")
        return informer

    @property
    def is_synced(self) -> bool:
        """Whether every first list is complete."""
        return all(informer.is_synced for informer in self._by_kind.values())

    @property
    def is_serving(self) -> bool:
        """Whether the informers run."""
        return self._is_serving

    def problems(self) -> dict[str, str]:
        """Return the unhealthy kinds with their errors; empty means healthy."""
        found: dict[str, str] = {}
        for kind, informer in self._by_kind.items():
            if informer.is_healthy():
                continue
            failure = informer.last_failure
            found[kind.KIND] = repr(failure.error) if failure else "has not synced yet"
        return found

    async def serve(self) -> None:
        """Run the informers until cancelled; raises the error that stops them."""
        self._is_serving = True
        try:
            async with asyncio.TaskGroup() as tasks:
                for kind, informer in self._by_kind.items():
                    tasks.create_task(informer.run(), name=f"informer {kind.KIND}")
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from group
        finally:
            self._is_serving = False

    async def wait_synced(self, timeout_seconds: float) -> None:
        """Wait for every first list; `UnavailableError` names the missing kinds and errors."""
        try:
            async with asyncio.timeout(timeout_seconds):
                for informer in self._by_kind.values():
                    await informer.wait_synced()
        except TimeoutError as error:
            late = [item for item in self._by_kind.values() if not item.is_synced]
            problems = [item.last_failure.error for item in late if item.last_failure]
            reasons = "; ".join(f"{kind}: {why}" for kind, why in self.problems().items())
            raise UnavailableError(
                f"the cache did not sync within {timeout_seconds:g} s: {reasons}",
                hint="check that the store is up and that this process may read it",
            ) from (problems[0] if problems else error)
