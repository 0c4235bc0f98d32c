"""The informers of a cache as one thing: started together, synced together, failing together."""

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
        """Give the informer of a kind, if this cache has it."""
        return self._by_kind.get(kind)

    def of(self, kind: type[R]) -> Informer[R]:
        """Give the informer of a kind; one that this cache does not have is an error."""
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
        """Whether the store is being followed."""
        return self._is_serving

    def troubles(self) -> dict[str, str]:
        """Say which kinds are not well, and why; empty is healthy."""
        found: dict[str, str] = {}
        for kind, informer in self._by_kind.items():
            if informer.is_healthy():
                continue
            problem = informer.last_failure
            found[kind.KIND] = repr(problem.error) if problem else "has not synced yet"
        return found

    async def serve(self) -> None:
        """Follow the store until cancelled; raises what makes that impossible."""
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
        """Wait for every first list; `UnavailableError` says which kinds are missing and why."""
        try:
            async with asyncio.timeout(timeout_seconds):
                for informer in self._by_kind.values():
                    await informer.wait_synced()
        except TimeoutError as error:
            late = [item for item in self._by_kind.values() if not item.is_synced]
            problems = [item.last_failure.error for item in late if item.last_failure]
            reasons = "; ".join(f"{kind}: {why}" for kind, why in self.troubles().items())
            raise UnavailableError(
                f"the cache did not sync within {timeout_seconds:g} s: {reasons}",
                hint="check that the store is up and may be read",
            ) from (problems[0] if problems else error)
