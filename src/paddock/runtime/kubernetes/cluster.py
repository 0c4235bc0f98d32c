"""The ports of the driver to a cluster: writes, raw API requests and caches.

`paddock.app` passes in a Kubernetes store and its informers, which implement these protocols.
"""

from collections.abc import Callable
from typing import Protocol, TypeVar

from paddock.resources.kinds.pods import Pod, VolumeClaim
from paddock.resources.meta import Key, R, Resource
from paddock.resources.selectors import LabelSelector
from paddock.runtime.port import Blueprint

R_co = TypeVar("R_co", bound=Resource, covariant=True)


class ResourceList(Protocol[R_co]):
    """The result of a list."""

    @property
    def items(self) -> tuple[R_co, ...]: ...


class Cluster(Protocol):
    """Writes to the API server."""

    async def get(self, kind: type[R], key: Key) -> R:
        """Read an object. Raises `NotFoundError`."""
        ...

    async def list(
        self, kind: type[R], *, namespace: str | None = None, labels: LabelSelector | None = None
    ) -> ResourceList[R]:
        """List objects by label, in one namespace or in all."""
        ...

    async def create(self, obj: R) -> R:
        """Create an object. Raises `AlreadyExistsError`."""
        ...

    async def update(self, obj: R) -> R:
        """Update an object. Raises `ConflictError`."""
        ...

    async def delete(self, kind: type[R], key: Key, *, uid: str | None = None) -> Resource:
        """Start the deletion of an object. Raises `NotFoundError` or `ConflictError`."""
        ...


class ApiClient(Protocol):
    """Raw requests to the API server, for what a store does not offer."""

    async def request(
        self,
        verb: str,
        path: str,
        *,
        resource: str = "",
        body: bytes | None = None,
        content_type: str = "application/json",
    ) -> bytes:
        """Send a request. An error response is raised as one of `kit.errors`."""
        ...


class PodCache(Protocol):
    """A cache of Paddock's pods, kept up to date by an informer."""

    def get(self, key: Key) -> Pod | None: ...

    def all(self) -> tuple[Pod, ...]: ...

    def subscribe(self, handler: Callable[[Pod | None, Pod | None], None]) -> Callable[[], None]:
        """Call the handler with `(old, new)` on every change, existing pods first."""
        ...

    def observe(self, obj: Pod) -> None:
        """Store the response to a write."""
        ...


class VolumeClaimCache(Protocol):
    """A cache of Paddock's volume claims."""

    def all(self) -> tuple[VolumeClaim, ...]: ...

    def by_index(self, name: str, value: str) -> tuple[VolumeClaim, ...]:
        """Return the claims of a sandbox, by the index `uid`."""
        ...

    def observe(self, obj: VolumeClaim) -> None:
        """Store the response to a write."""
        ...


BlueprintLookup = Callable[[str], Blueprint | None]
"""Returns the current blueprint of a sandbox, or `None` if the sandbox is gone."""
