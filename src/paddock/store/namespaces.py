"""Namespaces of the embedded stores: default namespaces, and deletion together with the contents.

On Kubernetes the API server does this.
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

DEFAULT_NAMESPACES = ("default", "paddock-system")
"""Created when a store is opened; they cannot be deleted."""


def create_defaults(working: WorkingSet, now: datetime) -> list[Mutation]:
    """Return the changes that create the default namespaces that do not exist yet."""
    tx = Transaction(working, now)
    for name in DEFAULT_NAMESPACES:
        if tx.get(Namespace, Key("", name)) is None:
            wanted = Namespace(metadata=ObjectMeta(name=name))
            tx.put(semantics.prepare_create(wanted, uid=ids.uid(), now=now, with_status=False))
    return tx.mutations


def check_namespace(tx: Transaction, obj: Resource) -> None:
    """Raise if the object's namespace does not exist or is being deleted."""
    name = obj.metadata.namespace
    if not obj.NAMESPACED:
        return
    namespace = tx.get(Namespace, Key("", name))
    if namespace is None:
        raise NotFoundError(
            f"there is no Namespace {name}", hint=f"kubectl create namespace {name}"
        )
    if namespace.is_deleting:
        raise ForbiddenError(
            f"cannot create {obj.KIND} {obj.key}: Namespace {name} is being deleted"
        )


def begin_delete(tx: Transaction, namespace: Namespace) -> Namespace:
    """Mark a namespace for deletion; it is removed after the last object in it."""
    name = namespace.metadata.name
    if name in DEFAULT_NAMESPACES:
        raise ForbiddenError(f"Namespace {name} always exists and cannot be deleted")
    finalizers = namespace.metadata.finalizers
    if semantics.NAMESPACE_FINALIZER not in finalizers:
        finalizers = (*finalizers, semantics.NAMESPACE_FINALIZER)
    marked = semantics.marked_for_deletion(namespace, finalizers=finalizers, now=tx.now)
    if marked is namespace:
        return namespace
    stored = tx.put(structs.replace(marked, status=NamespaceStatus(phase="Terminating")))
    tx.backlog.extend((type(obj), obj.key) for obj in tx.contents(name))
    tx.owners_to_check[Namespace, stored.key] = None
    return stored
