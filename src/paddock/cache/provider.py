"""The read side of the domain, for manager, gateway and controllers.

Lookups are served from memory by index: they neither scan a kind nor call the store. `live`
bypasses the cache, `write` updates it with the process's own writes, `waits` waits for
controllers. Objects are immutable and shared: callers may keep them.

A missing object is `None`. Several where only one is possible is a `ConflictError`. A cache that
has not synced raises `UnavailableError`, so that "not synced" is never taken for "not found".
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Collection, Hashable, Iterable
from typing import TypeVar

from paddock.cache import indexes
from paddock.cache.informers import Filters, Informers, Transforms
from paddock.cache.route_view import route_view
from paddock.cache.waits import TICK_SECONDS, Waits
from paddock.cache.writes import Writer
from paddock.engine.informer import Informer
from paddock.engine.reader import Reader
from paddock.kit import clock as clocks
from paddock.kit.errors import ConflictError, InvalidError, UnavailableError
from paddock.kit.tasks import background
from paddock.resources.kinds.batch import BatchSandbox
from paddock.resources.kinds.checkpoint import Checkpoint
from paddock.resources.kinds.claim import SandboxClaim
from paddock.resources.kinds.env import SandboxEnv
from paddock.resources.kinds.pool import SandboxPool
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.kinds.template import SandboxTemplate
from paddock.resources.kinds.template_build import TemplateBuild
from paddock.resources.meta import Key, Resource
from paddock.resources.rights import SHARED_NAMESPACE
from paddock.store.port import Store

R = TypeVar("R", bound=Resource)

KINDS: tuple[type[Resource], ...] = (
    SandboxTemplate,
    Sandbox,
    SandboxPool,
    SandboxClaim,
    Checkpoint,
    BatchSandbox,
    SandboxEnv,
    TemplateBuild,
)
SYNC_SECONDS = 60.0


class Provider:
    """Indexed lookups over informers."""

    def __init__(
        self,
        store: Store,
        *,
        kinds: Iterable[type[Resource]] = KINDS,
        filters: Filters | None = None,
        is_route_view: bool = False,
        clock: clocks.Clock | None = None,
        tick_seconds: float = TICK_SECONDS,
    ) -> None:
        self.clock = clock or clocks.system()
        self._store = store
        self._is_route_view = is_route_view
        transforms: Transforms = {Sandbox: route_view} if is_route_view else {}
        self._informers = Informers(
            store, kinds, filters=filters or {}, transforms=transforms, clock=self.clock
        )
        self._writer = Writer(store, self._informers.get)
        self.waits = Waits(self._informers.of, store, self.clock, tick_seconds=tick_seconds)

    @classmethod
    def for_gateway(
        cls, store: Store, *, filters: Filters | None = None, clock: clocks.Clock | None = None
    ) -> "Provider":
        """Return a provider that caches route views of Sandboxes only."""
        return cls(store, kinds=(Sandbox,), filters=filters, is_route_view=True, clock=clock)

    # ---- life ----------------------------------------------------------------------------

    async def serve(self) -> None:
        """Run the informers until cancelled; raises the error that stops them."""
        await self._informers.serve()

    async def wait_synced(self, timeout_seconds: float = SYNC_SECONDS) -> None:
        """Wait until every kind has synced; `UnavailableError` after the timeout."""
        await self._informers.wait_synced(timeout_seconds)

    @contextlib.asynccontextmanager
    async def run(self, *, timeout_seconds: float = SYNC_SECONDS) -> AsyncGenerator["Provider"]:
        """Serve in the background; the body starts when every kind has synced.

        An error before the sync is raised here. A later one is raised when the body ends; until
        then `problems` reports it.
        """
        async with background(self.serve(), name="cache") as serving:
            async with background(self.wait_synced(timeout_seconds), name="cache sync") as synced:
                await asyncio.wait((serving, synced), return_when=asyncio.FIRST_COMPLETED)
                if serving.done():
                    await serving
                await synced
            yield self
            if serving.done():
                await serving

    @property
    def is_synced(self) -> bool:
        """Whether every first list is complete."""
        return self._informers.is_synced

    def problems(self) -> dict[str, str]:
        """Return the unhealthy kinds with their errors; empty means healthy."""
        found = self._informers.problems()
        if not self._informers.is_serving:
            found["cache"] = "is not running"
        return found

    def informer(self, kind: type[R]) -> Informer[R]:
        """Return the informer of a kind, for subscriptions."""
        return self._informers.of(kind)

    @property
    def live(self) -> Reader:
        """Return the reader that bypasses the cache."""
        return self._store

    @property
    def write(self) -> Writer:
        """Return the writer that updates this cache with every write."""
        if self._is_route_view:
            raise InvalidError(
                "this cache is read-only: it holds route views, "
                "and a write would erase the dropped fields"
            )
        return self._writer

    # ---- any kind ------------------------------------------------------------------------

    def get(self, kind: type[R], key: Key) -> R | None:
        """Find an object by its key."""
        return self._synced(kind).get(key)

    def all(self, kind: type[R], *, namespace: str | None = None) -> tuple[R, ...]:
        """Return every object of a kind: for listings and janitors, not for lookups."""
        found = self._synced(kind).all()
        if namespace is None:
            return found
        return tuple(obj for obj in found if obj.metadata.namespace == namespace)

    def by_index(self, kind: type[R], index: str, value: Hashable) -> tuple[R, ...]:
        """Find objects by an index of `paddock.cache.indexes`."""
        return self._synced(kind).by_index(index, value)

    def view(self, kind: type[R], index: str, value: Hashable) -> Collection[R]:
        """Return the live collection behind `by_index`, uncopied: valid until the next `await`."""
        return self._synced(kind).view(index, value)

    def children(self, kind: type[R], owner: Resource) -> tuple[R, ...]:
        """Find the objects that an owner controls."""
        return self.by_index(kind, indexes.OWNER_UID, owner.metadata.uid)

    # ---- sandboxes -----------------------------------------------------------------------

    def sandbox(self, key: Key) -> Sandbox | None:
        """Find a sandbox, claimed or not, by its key."""
        return self.get(Sandbox, key)

    def claimed_sandbox(self, sandbox_id: str) -> Sandbox | None:
        """Find a claimed sandbox by its public id."""
        found = self.view(Sandbox, indexes.SANDBOX_ID, sandbox_id)
        return _only(found, f"sandbox id {sandbox_id}")

    def sandboxes(self, owner: str) -> tuple[Sandbox, ...]:
        """Find a team's sandboxes."""
        return self.by_index(Sandbox, indexes.USER, owner)

    def sandboxes_in_pool(self, pool: Key) -> tuple[Sandbox, ...]:
        """Find a pool's unclaimed sandboxes, in any state."""
        return self.by_index(Sandbox, indexes.SANDBOX_POOL, pool)

    def sandboxes_of_batch(self, batch: Key) -> tuple[Sandbox, ...]:
        """Find the sandboxes that serve a batch."""
        return self.by_index(Sandbox, indexes.BATCH, batch)

    def sandboxes_of_claim(self, claim: Key) -> tuple[Sandbox, ...]:
        """Find the sandboxes of a SandboxClaim."""
        return self.by_index(Sandbox, indexes.CLAIM, claim)

    # ---- other kinds ---------------------------------------------------------------------

    def template(self, name: str, *, namespace: str | None = None) -> SandboxTemplate | None:
        """Find a template by name or alias: the namespace's own first, then a public one.

        Of public ones, that of the shared namespace: a team cannot replace it by its own.
        """
        best: tuple[tuple[bool, bool, bool, Key], SandboxTemplate] | None = None
        for item in self.view(SandboxTemplate, indexes.TEMPLATE_ID, name):
            is_foreign = namespace is not None and item.metadata.namespace != namespace
            if is_foreign and not item.spec.public:
                continue
            is_shared = item.metadata.namespace == SHARED_NAMESPACE
            rank = (is_foreign, not is_shared, item.metadata.name != name, item.key)
            if best is None or rank < best[0]:
                best = (rank, item)
        return None if best is None else best[1]

    def templates(self, *, namespace: str | None = None) -> tuple[SandboxTemplate, ...]:
        """Return the templates that a namespace may use: its own and public ones."""
        found = self.all(SandboxTemplate)
        if namespace is None:
            return found
        return tuple(
            item for item in found if item.spec.public or item.metadata.namespace == namespace
        )

    def builds_of_template(self, template: Key) -> dict[str, TemplateBuild]:
        """Return the builds of a template by name, in no particular order."""
        found = self.view(TemplateBuild, indexes.TEMPLATE_ID, template.name)
        return {
            item.metadata.name: item
            for item in found
            if item.metadata.namespace == template.namespace
        }

    def pool(self, name: str, *, namespace: str | None = None) -> SandboxPool | None:
        """Find a pool."""
        return self._named(SandboxPool, name, namespace)

    def pools(self, *, namespace: str | None = None) -> tuple[SandboxPool, ...]:
        """Return every pool."""
        return self.all(SandboxPool, namespace=namespace)

    def pools_of_template(self, name: str) -> tuple[SandboxPool, ...]:
        """Find the pools that refer to a template."""
        return self.by_index(SandboxPool, indexes.TEMPLATE_ID, name)

    def env(self, name: str, *, namespace: str | None = None) -> SandboxEnv | None:
        """Find an environment."""
        return self._named(SandboxEnv, name, namespace)

    def envs(self, *, namespace: str | None = None) -> tuple[SandboxEnv, ...]:
        """Return every environment."""
        return self.all(SandboxEnv, namespace=namespace)

    def claim(self, name: str, *, namespace: str | None = None) -> SandboxClaim | None:
        """Find a claim."""
        return self._named(SandboxClaim, name, namespace)

    def batch(self, name: str, *, namespace: str | None = None) -> BatchSandbox | None:
        """Find a batch."""
        return self._named(BatchSandbox, name, namespace)

    def batches_of_pool(self, pool: Key) -> tuple[BatchSandbox, ...]:
        """Find the batches that a pool serves or that name it."""
        return self.by_index(BatchSandbox, indexes.POOL_REF, pool)

    def checkpoint(self, checkpoint_id: str) -> Checkpoint | None:
        """Find a checkpoint by its public id, or by one of its names."""
        found = self.view(Checkpoint, indexes.CHECKPOINT_ID, checkpoint_id)
        exact = [item for item in found if indexes.has_checkpoint_id(item, checkpoint_id)]
        return _only(exact or found, f"checkpoint {checkpoint_id}")

    def checkpoints(self, owner: str) -> tuple[Checkpoint, ...]:
        """Find a team's checkpoints."""
        return self.by_index(Checkpoint, indexes.USER, owner)

    def checkpoints_of_sandbox(self, sandbox: Key) -> tuple[Checkpoint, ...]:
        """Find the checkpoints of a sandbox by its key."""
        return self.by_index(Checkpoint, indexes.SANDBOX_NAME, sandbox)

    # ---- helpers -----------------------------------------------------------------------------

    def _synced(self, kind: type[R]) -> Informer[R]:
        informer = self._informers.of(kind)
        if not informer.is_synced:
            raise UnavailableError(
                f"the cache of {kind.KIND} has not synced yet", retry_after_seconds=1.0
            )
        return informer

    def _named(self, kind: type[R], name: str, namespace: str | None) -> R | None:
        if namespace is not None:
            return self.get(kind, Key(namespace, name))
        return _only(self.view(kind, indexes.NAME, name), f"{kind.KIND} {name}")


def _only(found: Collection[R], what: str) -> R | None:
    if len(found) > 1:
        keys = ", ".join(str(obj.key) for obj in found)
        raise ConflictError(f"{what} is ambiguous: {keys}", hint="name the namespace too")
    return next(iter(found), None)
