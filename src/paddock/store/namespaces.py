"""Namespaces as the embedded stores keep them: some always exist, and one ends with its contents.

On Kubernetes the cluster does this.
"""

from datetime import datetime

from msgspec import structs

from paddock.kit import ids
from paddock.kit.errors import ForbiddenError, NotFoundError
from paddock.resources.kinds.builtin import Namespace, NamespaceStatus
from paddock.resources.meta import Key, ObjectMeta, Resource
from paddock.store import semantics
from paddock.store.transaction import Transaction
from paddock.store.working_set import Mutation, WorkingSet

ALWAYS_THERE = ("default", "paddock-system")
"""Namespaces that exist without anybody creating them."""


def missing(working: WorkingSet, now: datetime) -> list[Mutation]:
    """Return the changes that make the namespaces that always exist."""
    tx = Transaction(working, now)
    for name in ALWAYS_THERE:
        if tx.get(Namespace, Key("", name)) is None:
            wanted = Namespace(metadata=ObjectMeta(name=name))
            tx.put(semantics.prepare_create(wanted, uid=ids.uid(), now=now, with_status=False))
    return tx.mutations


def check_place(tx: Transaction, obj: Resource) -> None:
    """Refuse an object whose namespace does not exist or is ending."""
    name = obj.metadata.namespace
    if not obj.NAMESPACED:
        return
    namespace = tx.get(Namespace, Key("", name))
    if namespace is None:
        raise NotFoundError(
            f"there is no Namespace {name}", hint=f"kubectl create namespace {name}"
        )
    if namespace.is_deleting:
        raise ForbiddenError(f"{obj.KIND} {obj.key} cannot be made: Namespace {name} is ending")


def begin_end(tx: Transaction, namespace: Namespace) -> Namespace:
    """Begin the end of a namespace: it goes when the last object in it has gone."""
    name = namespace.metadata.name
    if name in ALWAYS_THERE:
        raise ForbiddenError(f"Namespace {name} always exists and cannot be deleted")
    finalizers = namespace.metadata.finalizers
    if semantics.NAMESPACE_FINALIZER not in finalizers:
        finalizers = (*finalizers, semantics.NAMESPACE_FINALIZER)
    marked = semantics.marked_for_deletion(namespace, finalizers=finalizers, now=tx.now)
    if marked is namespace:
        return namespace
    stored = tx.put(structs.replace(marked, status=NamespaceStatus(phase="Terminating")))
    tx.backlog.extend((type(obj), obj.key) for obj in tx.contents(name))
    tx.bereft[Namespace, stored.key] = None
    return stored
