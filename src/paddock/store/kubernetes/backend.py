"""The Store port on a Kubernetes API server.

The server implements identity, versions, generations, finalizers and garbage collection. This
module adds the rest of the port: long lists are read in pages and restarted when a continue token
expires, and a watch without a version starts with the existing objects.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Self

from msgspec import structs

from paddock.kit import ids
from paddock.kit.errors import GoneError, InvalidError, NotFoundError
from paddock.resources.meta import Key, R
from paddock.resources.schema import validation
from paddock.resources.selectors import FieldSelector, LabelSelector
from paddock.store import semantics
from paddock.store.kubernetes import bodies, paths, responses
from paddock.store.kubernetes.access import Access
from paddock.store.kubernetes.client import (
    JSON,
    MERGE_PATCH,
    ClientSettings,
    KubernetesClient,
)
from paddock.store.kubernetes.selection import FilteredWatch, ServerFields, matches
from paddock.store.kubernetes.watching import Watch
from paddock.store.port import Change, Page, Propagation, Store, WatchEvent

_PAGED_TRIES = 3
"""After this many expired continue tokens, a list is read without paging."""


class KubernetesStore:
    """Stores resources on an API server."""

    def __init__(self, client: KubernetesClient) -> None:
        self.client = client
        self._fields = ServerFields()

    @classmethod
    def open(cls, access: Access, settings: ClientSettings | None = None) -> Self:
        """Create a store with its own client, which `close` closes."""
        return cls(KubernetesClient(access, settings))

    # Reading

    async def get(self, kind: type[R], key: Key) -> R:
        path = paths.object_path(kind, key)
        return responses.read_object(
            kind, await self.client.request("GET", path, resource=kind.PLURAL)
        )

    async def list(
        self,
        kind: type[R],
        *,
        namespace: str | None = None,
        labels: LabelSelector | None = None,
        fields: FieldSelector | None = None,
        limit: int | None = None,
        continue_token: str = "",
    ) -> Page[R]:
        """Return objects; without a limit all of them, read in pages."""
        if limit or continue_token:
            return await self._page(kind, namespace, labels, fields, limit, continue_token)
        for _ in range(_PAGED_TRIES):
            try:
                return await self._pages(kind, namespace, labels, fields)
            except GoneError:
                continue
        return await self._page(kind, namespace, labels, fields, None, "")

    async def _pages(
        self,
        kind: type[R],
        namespace: str | None,
        labels: LabelSelector | None,
        fields: FieldSelector | None,
    ) -> Page[R]:
        size = self.client.settings.page_size
        page = await self._page(kind, namespace, labels, fields, size, "")
        items = [*page.items]
        version = page.version
        while page.continue_token:
            page = await self._page(kind, namespace, labels, fields, size, page.continue_token)
            items += page.items
        if kind.NAMESPACED and not namespace:
            # Servers sort by the text "namespace/name", where a dash sorts before the slash.
            items.sort(key=lambda item: item.key)
        return Page(tuple(items), version)

    async def _page(
        self,
        kind: type[R],
        namespace: str | None,
        labels: LabelSelector | None,
        fields: FieldSelector | None,
        limit: int | None,
        continue_token: str,
    ) -> Page[R]:
        paging: dict[str, str] = {}
        if limit:
            paging["limit"] = str(limit)
        if continue_token:
            paging["continue"] = continue_token
        path = paths.collection_path(kind, namespace)
        while True:
            server_fields, client_fields = self._fields.split(kind, fields)
            params = _selectors(labels, server_fields) | paging
            try:
                data = await self.client.request("GET", path, resource=kind.PLURAL, params=params)
            except InvalidError as error:
                if self._fields.note_rejected(kind, fields, error):
                    continue
                raise
            items, meta = responses.read_list(kind, data)
            if client_fields is not None:
                items = tuple(filter(matches(client_fields), items))
            return Page(
                items, meta.resource_version, meta.continue_token, meta.remaining_item_count
            )

    # Writing

    async def create(self, obj: R, *, with_status: bool = False, dry_run: bool = False) -> R:
        """Store a new object; a status needs a second write, as it is a subresource."""
        kind = type(obj)
        # As in the other backends, check rules that the CRD schema cannot express.
        semantics.check_scope(obj)
        validation.validate_create(semantics.named(obj, ids.name_suffix()))
        path = paths.collection_path(kind, obj.metadata.namespace)
        data = await self.client.request(
            "POST",
            path,
            resource=kind.PLURAL,
            params=self._write_params(dry_run=dry_run),
            body=bodies.create_body(obj),
        )
        created = responses.read_object(kind, data)
        if not (with_status and semantics.has_status(kind)):
            return created
        wanted = structs.replace(obj, metadata=created.metadata)
        if getattr(wanted, "status") == getattr(created, "status"):  # noqa: B009
            return created
        return wanted if dry_run else await self.update_status(wanted)

    async def update(self, obj: R, *, dry_run: bool = False) -> R:
        kind = type(obj)
        semantics.check_names_version(obj)
        if paths.is_fully_modelled(kind):
            return await self._write(obj, "PUT", "", bodies.update_body(obj), JSON, dry_run)
        return await self._patch(obj, "", dry_run)

    async def update_status(self, obj: R, *, dry_run: bool = False) -> R:
        kind = type(obj)
        semantics.check_names_version(obj)
        if not semantics.has_status(kind):
            raise NotFoundError(f"{kind.KIND} has no status subresource")
        if paths.is_fully_modelled(kind):
            return await self._write(obj, "PUT", "/status", bodies.status_body(obj), JSON, dry_run)
        return await self._patch(obj, "/status", dry_run)

    async def _patch(self, obj: R, subresource: str, dry_run: bool) -> R:
        """Patch the changed fields of a built-in object, of which the struct has only a part."""
        current = await self.get(type(obj), obj.key)
        meta = obj.metadata
        semantics.check_preconditions(current, uid=meta.uid, resource_version=meta.resource_version)
        patch = bodies.change_patch(current, obj, status=bool(subresource))
        if patch is None:
            return current
        return await self._write(obj, "PATCH", subresource, patch, MERGE_PATCH, dry_run)

    async def _write(
        self, obj: R, verb: str, subresource: str, body: bytes, content_type: str, dry_run: bool
    ) -> R:
        kind = type(obj)
        data = await self.client.request(
            verb,
            paths.object_path(kind, obj.key) + subresource,
            resource=kind.PLURAL,
            params=self._write_params(dry_run=dry_run),
            body=body,
            content_type=content_type,
        )
        return responses.read_object(kind, data)

    def _write_params(self, *, dry_run: bool) -> dict[str, str]:
        params = {
            "fieldManager": self.client.settings.field_manager,
            "fieldValidation": "Strict",
        }
        if dry_run:
            params["dryRun"] = "All"
        return params

    async def delete(
        self,
        kind: type[R],
        key: Key,
        *,
        uid: str | None = None,
        resource_version: str | None = None,
        propagation: Propagation = Propagation.BACKGROUND,
        dry_run: bool = False,
    ) -> R:
        """Mark or remove an object; a failed precondition is a `ConflictError`.

        If the object is removed at once, the response does not contain it. It is therefore read
        before, and the deletion is bound to the uid that was read.
        """
        last = await self.get(kind, key)
        semantics.check_preconditions(last, uid=uid, resource_version=resource_version)
        body = bodies.delete_body(propagation, last.metadata.uid, resource_version, dry_run=dry_run)
        data = await self.client.request(
            "DELETE", paths.object_path(kind, key), resource=kind.PLURAL, body=body
        )
        return last if responses.is_status(data) else responses.read_object(kind, data)

    # Watching

    async def watch(
        self,
        kind: type[R],
        *,
        since: str | None = None,
        namespace: str | None = None,
        labels: LabelSelector | None = None,
        fields: FieldSelector | None = None,
    ) -> AsyncGenerator[WatchEvent[R]]:
        """Stream changes; broken connections are resumed, `GoneError` if that is not possible."""
        known: tuple[R, ...] = ()
        if not since:
            page = await self.list(kind, namespace=namespace, labels=labels, fields=fields)
            known, since = page.items, page.version
            for item in known:
                yield WatchEvent(Change.ADDED, item, item.metadata.resource_version)
            yield WatchEvent(Change.BOOKMARK, None, since)
        while True:
            server_fields, client_fields = self._fields.split(kind, fields)
            path = paths.collection_path(kind, namespace)
            stream = Watch(self.client, kind, path, _selectors(labels, server_fields)).follow(since)
            filtered: FilteredWatch[R] | None = (
                None if client_fields is None else FilteredWatch(client_fields)
            )
            if filtered is not None:
                for item in known:
                    filtered.start(item)
            try:
                async with aclosing(stream) as events:
                    async for event in events:
                        yield event if filtered is None else filtered.translate(event)
            except InvalidError as error:
                # Rejected before the first event, so no event is sent twice.
                if not self._fields.note_rejected(kind, fields, error):
                    raise

    async def close(self) -> None:
        """Close every connection; no call may follow."""
        await self.client.close()


def _selectors(labels: LabelSelector | None, fields: FieldSelector | None) -> dict[str, str]:
    params: dict[str, str] = {}
    if labels is not None and labels.requirements:
        params["labelSelector"] = str(labels)
    if fields is not None and fields.terms:
        params["fieldSelector"] = str(fields)
    return params


_: type[Store] = KubernetesStore
