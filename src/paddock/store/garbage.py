"""Deletion and garbage collection of dependents, with the rules of Kubernetes.

- `begin_delete` marks or removes one object. `Orphan` first removes the owner references of its
  dependents. `Foreground` adds a finalizer that holds the object until its blocking dependents are
  gone.
- `collect` processes the backlog of a transaction: a dependent whose owners are all gone is
  deleted; one that still has an owner loses only the references to owners that are gone.

An owner of a kind that the store does not hold counts as present, as its state is unknown here.
"""

from collections.abc import Iterable

from msgspec import structs

from paddock.resources.meta import R, Resource
from paddock.store.port import Propagation
from paddock.store.semantics import (
    FOREGROUND_FINALIZER,
    NAMESPACE_FINALIZER,
    ORPHAN_FINALIZER,
    marked_for_deletion,
)
from paddock.store.transaction import Transaction
from paddock.store.working_set import WorkingSet

CHUNK = 500
"""Maximum number of changes in one transaction. The rest of the backlog follows in further ones, so
that deleting an owner of thousands of objects does not delay other writes."""
_WAITING_FINALIZERS = (FOREGROUND_FINALIZER, NAMESPACE_FINALIZER)
_GC_FINALIZERS = (FOREGROUND_FINALIZER, ORPHAN_FINALIZER)


def begin_delete(tx: Transaction, obj: R, propagation: Propagation) -> R:
    """Mark an object for deletion, or remove it if no finalizer holds it."""
    finalizers = tuple(name for name in obj.metadata.finalizers if name not in _GC_FINALIZERS)
    uid = obj.metadata.uid
    if propagation is Propagation.ORPHAN:
        for dependent in tx.dependents(uid):
            _remove_owners(tx, dependent, {uid})
    elif propagation is Propagation.FOREGROUND and tx.dependents(uid):
        finalizers += (FOREGROUND_FINALIZER,)
    if not finalizers:
        return tx.remove(obj)
    marked = marked_for_deletion(obj, finalizers=finalizers, now=tx.now)
    if marked is obj:
        return obj
    stored = tx.put(marked)
    if FOREGROUND_FINALIZER in finalizers:
        tx.backlog.append(uid)
        tx.owners_to_check[type(stored), stored.key] = None
    return stored


def finish_if_released(tx: Transaction, obj: R) -> R:
    """Store an object, or remove it if it is being deleted and has no finalizers left."""
    if obj.is_deleting and not obj.metadata.finalizers:
        return tx.remove(obj)
    return tx.put(obj)


def check_owners_later(tx: Transaction, obj: Resource) -> None:
    """Enqueue an object with new owner references: the owners may be gone already."""
    if obj.metadata.owner_references:
        tx.backlog.append((type(obj), obj.key))


def collect(tx: Transaction) -> None:
    """Process the backlog up to `CHUNK` changes; the rest stays in the backlog."""
    while (tx.backlog or tx.owners_to_check) and len(tx.mutations) < CHUNK:
        while tx.backlog and len(tx.mutations) < CHUNK:
            item = tx.backlog.popleft()
            if isinstance(item, str):
                tx.backlog.extend((type(obj), obj.key) for obj in tx.dependents(item))
            elif (obj := tx.get(*item)) is not None:
                _check_owners(tx, obj)
        if not tx.backlog:
            _release_waiting(tx)


def find_uncollected(tx: Transaction, working: WorkingSet) -> None:
    """Fill the backlog after a restart. Checks every object once."""
    for uid in working.owners():
        for dependent in tx.dependents(uid)[:1]:
            references = dependent.metadata.owner_references
            reference = next(item for item in references if item.uid == uid)
            owner = tx.owner(reference, dependent.metadata.namespace)
            if owner is None and tx.is_known(reference):
                tx.backlog.append(uid)
    for table in working.tables():
        for key, obj in table.objects.items():
            if obj.metadata.deletion_timestamp is not None and _waits(obj):
                tx.backlog.append(obj.metadata.uid)
                tx.backlog.extend((type(item), item.key) for item in _contents(tx, obj))
                tx.owners_to_check[table.kind, key] = None


def _check_owners(tx: Transaction, obj: Resource) -> None:
    if tx.deleting_namespace(obj) is not None:
        if not obj.is_deleting:
            begin_delete(tx, obj, Propagation.BACKGROUND)
        return
    gone: set[str] = set()
    waiting: set[str] = set()
    has_owner = False
    for reference in obj.metadata.owner_references:
        owner = tx.owner(reference, obj.metadata.namespace)
        if owner is None and tx.is_known(reference):
            gone.add(reference.uid)
        elif owner is not None and _waits(owner):
            waiting.add(reference.uid)
        else:
            has_owner = True
    if has_owner:
        _remove_owners(tx, obj, gone | waiting)
    elif not obj.is_deleting and (gone or waiting):
        begin_delete(tx, obj, _propagation(tx, obj, has_waiting_owner=bool(waiting)))


def _propagation(tx: Transaction, obj: Resource, *, has_waiting_owner: bool) -> Propagation:
    if ORPHAN_FINALIZER in obj.metadata.finalizers:
        return Propagation.ORPHAN
    foreground = FOREGROUND_FINALIZER in obj.metadata.finalizers
    if foreground or (has_waiting_owner and tx.dependents(obj.metadata.uid)):
        return Propagation.FOREGROUND
    return Propagation.BACKGROUND


def _release_waiting(tx: Transaction) -> None:
    """Remove owners whose last blocking dependent is gone."""
    owners_to_check, tx.owners_to_check = tx.owners_to_check, {}
    for place in owners_to_check:
        owner = tx.get(*place)
        if owner is None or not _waits(owner) or _is_blocked(tx, owner):
            continue
        finalizers = tuple(
            name for name in owner.metadata.finalizers if name not in _WAITING_FINALIZERS
        )
        meta = structs.replace(owner.metadata, finalizers=finalizers)
        finish_if_released(tx, structs.replace(owner, metadata=meta))


def _is_blocked(tx: Transaction, owner: Resource) -> bool:
    uid = owner.metadata.uid
    if any(True for _ in _contents(tx, owner)):
        return True
    return any(
        reference.uid == uid and reference.block_owner_deletion
        for dependent in tx.dependents(uid)
        for reference in dependent.metadata.owner_references
    )


def _remove_owners(tx: Transaction, obj: Resource, uids: set[str]) -> None:
    kept = tuple(item for item in obj.metadata.owner_references if item.uid not in uids)
    if kept != obj.metadata.owner_references:
        tx.put(structs.replace(obj, metadata=structs.replace(obj.metadata, owner_references=kept)))


def _waits(owner: Resource) -> bool:
    finalizers = owner.metadata.finalizers
    return owner.is_deleting and any(name in finalizers for name in _WAITING_FINALIZERS)


def _contents(tx: Transaction, obj: Resource) -> Iterable[Resource]:
    is_namespace = NAMESPACE_FINALIZER in obj.metadata.finalizers
    return tx.contents(obj.metadata.name) if is_namespace else ()
