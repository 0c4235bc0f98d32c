"""All objects of a store in memory: visible ones, and decided changes that are not durable yet.

Readers see visible objects only. Writers decide against the newest state, durable or not, so that
many writes can be in flight. Decided changes become visible in the order of their versions when
the backend reports that they are durable, and are rolled back when the commit fails.

Used on the thread of the event loop only.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, cast

from paddock.kit.errors import InvalidError
from paddock.resources.meta import Key, OwnerReference, R, Resource
from paddock.store.port import Change
from paddock.store.table import BOOKMARK_EVERY, DEFAULT_HISTORY, Entry, Table, VisibleVersion

Place = tuple[type[Resource], Key]
FIRST_VERSION = 1
"""The version of an empty store. 0 is no version: to Kubernetes clients it means `any`."""


class Mutation(NamedTuple):
    """A change of one object with its version; possibly not durable yet."""

    place: Place
    entry: Entry[Resource]

    @property
    def after(self) -> Resource | None:
        """Return the object after the change; `None` if it is deleted."""
        return None if self.entry.change is Change.DELETED else self.entry.object


class PendingCommit(Protocol):
    """Writes that become durable together."""

    number: int

    async def settled(self) -> bool:
        """Wait for the commit and return whether it is durable."""
        ...


class Pending(NamedTuple):
    """A decided change of one object, and the commit that makes it durable."""

    mutation: Mutation
    batch: PendingCommit


class WorkingSet:
    """Holds every object of a store."""

    def __init__(
        self,
        kinds: Sequence[type[Resource]],
        *,
        version: int = FIRST_VERSION,
        history: int = DEFAULT_HISTORY,
    ) -> None:
        self.visible_version = VisibleVersion(version)
        self.decided = version
        """The newest version assigned; never less than the visible one."""
        self.pending: dict[Place, Pending] = {}
        self._tables: dict[type[Resource], Table[Any]] = {
            kind: Table(kind, self.visible_version, history=history) for kind in kinds
        }
        self._by_name = {(kind.API_VERSION, kind.KIND): kind for kind in kinds}
        self._dependents: dict[str, dict[Place, None]] = {}
        # Owner uid to the objects that reference it now or in a pending change. It may contain more
        # than that, so readers check the object itself; pending changes then need no second index.

    def table(self, kind: type[R]) -> Table[R]:
        """Return the table of one kind; `InvalidError` for other kinds."""
        table = self._tables.get(kind)
        if table is None:
            raise InvalidError(
                f"this store does not hold objects of kind {kind.KIND or kind.__name__}"
            )
        return cast("Table[R]", table)

    def holds(self, kind: type[Resource]) -> bool:
        """Whether this store holds objects of this kind."""
        return kind in self._tables

    def tables(self) -> Iterable[Table[Any]]:
        return self._tables.values()

    def kind_of(self, reference: OwnerReference) -> type[Resource] | None:
        """Return the kind of an owner reference, or `None` if this store does not hold it."""
        return self._by_name.get((reference.api_version, reference.kind))

    def dependents(self, uid: str) -> tuple[Place, ...]:
        """Return kind and key of the objects that may reference this owner."""
        return tuple(self._dependents.get(uid, ()))

    def owners(self) -> Iterator[str]:
        """Return the owner uids that some object may reference."""
        return iter(tuple(self._dependents))

    def index(self, place: Place, obj: Resource) -> None:
        """Index an object by its owners."""
        for reference in obj.metadata.owner_references:
            self._dependents.setdefault(reference.uid, {})[place] = None

    def decide(self, mutations: Sequence[Mutation], batch: PendingCommit) -> None:
        """Record changes that are not durable yet; later writers read them."""
        for mutation in mutations:
            self.pending[mutation.place] = Pending(mutation, batch)
            if mutation.entry.object.metadata.owner_references:
                self.index(mutation.place, mutation.entry.object)
        self.decided = mutations[-1].entry.version

    def apply(self, mutations: Sequence[Mutation]) -> None:
        """Make durable changes visible in order, and wake watchers."""
        if not mutations:
            return
        before = self.visible_version.visible
        # Set the version first, so that a woken watcher sees the whole commit.
        self.visible_version.visible = mutations[-1].entry.version
        self.decided = max(self.decided, self.visible_version.visible)
        for mutation in mutations:
            place, entry = mutation
            self._tables[place[0]].apply(entry, place[1])
            self._settle(mutation)
            if entry.old is not None and entry.old.metadata.owner_references:
                self._unindex(place, entry.old, mutation.after)
        if before // BOOKMARK_EVERY != self.visible_version.visible // BOOKMARK_EVERY:
            for table in self._tables.values():
                table.wake()

    def roll_back(self, mutations: Sequence[Mutation]) -> None:
        """Discard changes that could not be made durable. Their versions are not reused."""
        for mutation in mutations:
            self._settle(mutation)
            place, entry = mutation
            if entry.object.metadata.owner_references:
                self._unindex(place, entry.object, self._tables[place[0]].objects.get(place[1]))

    def _settle(self, mutation: Mutation) -> None:
        pending = self.pending.get(mutation.place)
        if pending is not None and pending.mutation is mutation:
            del self.pending[mutation.place]

    def _unindex(self, place: Place, old: Resource, now: Resource | None) -> None:
        kept = {item.uid for item in now.metadata.owner_references} if now is not None else ()
        pending = self.pending.get(place)
        for reference in old.metadata.owner_references:
            if reference.uid in kept or (
                pending is not None and not _is_unreferenced(pending, reference)
            ):
                continue
            places = self._dependents.get(reference.uid)
            if places is not None:
                places.pop(place, None)
                if not places:
                    del self._dependents[reference.uid]


def _is_unreferenced(pending: Pending, reference: OwnerReference) -> bool:
    references = pending.mutation.entry.object.metadata.owner_references
    return all(item.uid != reference.uid for item in references)
