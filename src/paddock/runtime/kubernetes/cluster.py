"""What the driver needs of a cluster, handed in by `paddock.app`: a way to write, and pictures.

A Kubernetes store and its informers fit as they are; the driver knows neither.
"""

from collections.abc import Callable
from typing import Protocol, TypeVar

from paddock.resources.kinds.pods import Pod, VolumeClaim
from paddock.resources.meta import Key, R, Resource
from paddock.resources.selectors import LabelSelector
from paddock.runtime.port import Blueprint

R_co = TypeVar("R_co", bound=Resource, covariant=True)


class Listed(Protocol[R_co]):
    """What a list gives."""

    @property
    def items(self) -> tuple[R_co, ...]:
        """Give the objects."""
        ...


class Cluster(Protocol):
    """Writes to the API server."""

    async def get(self, kind: type[R], key: Key) -> R:
        """Read one; `NotFoundError`."""
        ...

    async def list(
        self, kind: type[R], *, namespace: str | None = None, labels: LabelSelector | None = None
    ) -> Listed[R]:
        """Read all that have these labels; without a namespace, in every one."""
        ...

    async def create(self, obj: R) -> R:
        """Make one; `AlreadyExistsError`."""
        ...

    async def update(self, obj: R) -> R:
        """Change one; `ConflictError`."""
        ...

    async def delete(self, kind: type[R], key: Key, *, uid: str | None = None) -> Resource:
        """Begin the deletion of one; `NotFoundError`, `ConflictError`."""
        ...


class Asking(Protocol):
    """A way to ask the API server what a store has no words for."""

    async def request(
        self,
        verb: str,
        path: str,
        *,
        resource: str = "",
        body: bytes | None = None,
        content_type: str = "application/json",
    ) -> bytes:
        """Ask; a refusal is one of `kit.errors`."""
        ...


class Pods(Protocol):
    """A picture of our pods, kept fresh by somebody else."""

    def get(self, key: Key) -> Pod | None:
        """Find one."""
        ...

    def all(self) -> tuple[Pod, ...]:
        """Give all."""
        ...

    def subscribe(self, handler: Callable[[Pod | None, Pod | None], None]) -> Callable[[], None]:
        """Hear of every change, as `(old, new)`, what is there already first."""
        ...

    def observe(self, obj: Pod) -> None:
        """Take in the answer to a write."""
        ...


class Claims(Protocol):
    """A picture of our volume claims."""

    def all(self) -> tuple[VolumeClaim, ...]:
        """Give all."""
        ...

    def by_index(self, name: str, value: str) -> tuple[VolumeClaim, ...]:
        """Find those of a sandbox, by the index `uid`."""
        ...

    def observe(self, obj: VolumeClaim) -> None:
        """Take in the answer to a write."""
        ...


BlueprintOf = Callable[[str], Blueprint | None]
"""Says anew what a sandbox is made of; `None` for one that is no more."""
