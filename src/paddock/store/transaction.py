"""A transaction over several objects: reads the newest state, collects changes with versions.

Nothing changes until the store commits the transaction, so that an error or a dry run leaves no
partial change.
"""

from collections import deque
from collections.abc import Iterator
from datetime import datetime
from typing import Any, cast

from paddock.kit import ids
from paddock.resources.kinds.builtin import Namespace
from paddock.resources.meta import Key, OwnerReference, R, Resource
from paddock.store.port import Change
from paddock.store.semantics import NAMESPACE_FINALIZER, stamped
from paddock.store.table import Entry
from paddock.store.working_set import Mutation, PendingCommit, Place, WorkingSet


class Transaction:
    """The reads and changes of one write."""

    def __init__(self, working: WorkingSet, now: datetime) -> None:
        self.now = now
        self.mutations: list[Mutation] = []
        self.backlog: deque[str | Place] = deque()
        """Uids of deleted owners, and dependents to check; processed by `garbage`."""
        self.owners_to_check: dict[Place, None] = {}
        """Owners that lost a dependent in this transaction and may be waiting for that."""
        self.depends_on: PendingCommit | None = None
        """The last commit that this transaction has read from and that is not durable yet."""
        self._working = working
        self._version = working.decided
        self._changed: dict[Place, Resource | None] = {}
        self._dependents: dict[str, dict[Place, None]] = {}

    def get(self, kind: type[R], key: Key) -> R | None:
        """Return the newest state of an object, durable or not."""
        place: Place = (kind, key)
        if place in self._changed:
            return cast("R | None", self._changed[place])
        pending = self._working.pending.get(place)
        if pending is None:
            return self._working.table(kind).objects.get(key)
        batch = pending.batch
        if self.depends_on is None or batch.number > self.depends_on.number:
            self.depends_on = batch
        return cast("R | None", pending.mutation.after)

    def put(self, obj: R) -> R:
        """Write an object and return it with its version."""
        place: Place = (type(obj), obj.key)
        old = self.get(*place)
        self._version += 1
        obj = stamped(obj, self._version)
        change = Change.ADDED if old is None else Change.MODIFIED
        self._record(place, Entry(self._version, change, obj, old), obj)
        for reference in obj.metadata.owner_references:
            self._dependents.setdefault(reference.uid, {})[place] = None
        if old is not None:
            self._note_owners(old, keeping=obj.metadata.owner_references)
        return obj

    def remove(self, obj: R) -> R:
        """Remove an object and return it with the version of its deletion.

        Watchers get the object as it was last stored, without the changes of the deleting write.
        """
        place: Place = (type(obj), obj.key)
        old = self.get(*place)
        self._version += 1
        last = stamped(obj if old is None else old, self._version)
        self._record(place, Entry(self._version, Change.DELETED, last, old), None)
        obj = stamped(obj, self._version)
        self.backlog.append(obj.metadata.uid)
        self._note_owners(obj, keeping=())
        if (namespace := self.deleting_namespace(obj)) is not None:
            self.owners_to_check[Namespace, namespace.key] = None
        return obj

    def owner(self, reference: OwnerReference, namespace: str) -> Resource | None:
        """Return the owner, or `None` if there is none with this uid."""
        kind = self._working.kind_of(reference)
        if kind is None:
            return None
        found = self.get(kind, Key(namespace if kind.NAMESPACED else "", reference.name))
        return found if found is not None and found.metadata.uid == reference.uid else None

    def is_known(self, reference: OwnerReference) -> bool:
        """Whether this store holds the kind of an owner."""
        return self._working.kind_of(reference) is not None

    def dependents(self, uid: str) -> list[Resource]:
        """Return the objects that reference this owner."""
        places = dict.fromkeys(self._working.dependents(uid))
        places.update(self._dependents.get(uid, {}))
        found = (self.get(*place) for place in places)
        return [
            obj
            for obj in found
            if obj is not None
            and any(reference.uid == uid for reference in obj.metadata.owner_references)
        ]

    def contents(self, namespace: str) -> Iterator[Resource]:
        """Return the objects in a namespace."""
        for table in self._working.tables():
            for key in table.keys_in(namespace) if table.kind.NAMESPACED else ():
                if (obj := self.get(table.kind, key)) is not None:
                    yield obj
        not_visible = (*self._working.pending, *self._changed)
        for kind, key in dict.fromkeys(not_visible):
            if key.namespace != namespace or key in self._working.table(kind).objects:
                continue
            if (obj := self.get(kind, key)) is not None:
                yield obj

    def deleting_namespace(self, obj: Resource) -> Namespace | None:
        """Return the namespace of an object if it is being deleted, else `None`."""
        if not obj.NAMESPACED or not self._working.holds(Namespace):
            return None
        namespace = self.get(Namespace, Key("", obj.metadata.namespace))
        if namespace is None or NAMESPACE_FINALIZER not in namespace.metadata.finalizers:
            return None
        return namespace if namespace.is_deleting else None

    def free_suffix(self, kind: type[Resource], namespace: str, base: str) -> str:
        """Return a random suffix for a generated name that is not in use."""
        for _ in range(8):
            suffix = ids.name_suffix()
            if self.get(kind, Key(namespace, base + suffix)) is None:
                return suffix
        return ids.name_suffix(10)

    def _note_owners(self, obj: Resource, *, keeping: tuple[OwnerReference, ...]) -> None:
        for reference in obj.metadata.owner_references:
            kind = self._working.kind_of(reference)
            if kind is not None and reference not in keeping:
                namespace = obj.metadata.namespace if kind.NAMESPACED else ""
                self.owners_to_check[kind, Key(namespace, reference.name)] = None

    def _record(self, place: Place, entry: Entry[Any], after: Resource | None) -> None:
        self.mutations.append(Mutation(place, entry))
        self._changed[place] = after
