"""Watch: a stream of changes, one JSON document per line, from a resource version on."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.responses import Response, StreamingResponse

from paddock.api.kube.context import KubeCall
from paddock.api.kube.rendering import partial, render
from paddock.api.kube.requests import flag, number
from paddock.api.kube.status import BadRequestError, failure_status
from paddock.api.kube.tables import table
from paddock.api.kube.verbs.read import (
    field_selector,
    included_object,
    label_selector,
    negotiate_form,
    wants_stored,
)
from paddock.kit.errors import FieldProblem, PaddockError
from paddock.resources import codec
from paddock.resources.meta import Resource
from paddock.resources.selectors import FieldSelector, FieldTerm
from paddock.store.port import Change, Page

_encoder = msgspec.json.Encoder()
_INITIAL_END = {"k8s.io/initial-events-end": "true"}


class _LastEncoded:
    """The last encoded object: several gateways watch the same changes."""

    obj: Resource | None = None
    data = b""


def _stored(obj: Resource) -> bytes:
    if _LastEncoded.obj is not obj:
        _LastEncoded.obj, _LastEncoded.data = obj, codec.encode(obj)
    return _LastEncoded.data


class _Stream:
    """Form and options of one watch."""

    def __init__(self, call: KubeCall) -> None:
        request = call.request
        self.call = call
        self.info = call.target.info
        self.form = negotiate_form(request)
        self._is_stored = wants_stored(request)
        self.include = included_object(request)
        self.labels = label_selector(call)
        self.fields = _field_selector(call)
        self.since = request.query_params.get("resourceVersion", "")
        self.with_bookmarks = flag(request, "allowWatchBookmarks")
        self.with_initial = flag(request, "sendInitialEvents")
        settings = call.context.settings
        self.seconds = number(request, "timeoutSeconds") or settings.watch_seconds
        self.silence = settings.bookmark_seconds if self.with_bookmarks else self.seconds
        self._has_columns = False
        if self.with_initial and not self.with_bookmarks:
            problem = FieldProblem("sendInitialEvents", "needs allowWatchBookmarks=true")
            raise BadRequestError(str(problem), problems=[problem])

    def event(self, change: Change, obj: Resource) -> bytes:
        """Return the line of one change."""
        obj = self.call.shown(obj)
        if self._is_stored:
            return b'{"type":"%s","object":%s}\n' % (change.encode(), _stored(obj))
        return self._line(change, self._shown(obj))

    def bookmark(self, version: str, annotations: dict[str, str] | None = None) -> bytes:
        """Return a bookmark line."""
        metadata: dict[str, Any] = {"resourceVersion": version, "creationTimestamp": None}
        if annotations:
            metadata["annotations"] = annotations
        document: dict[str, Any] = {
            "kind": self.info.kind,
            "apiVersion": self.info.cls.API_VERSION,
            "metadata": metadata,
        }
        if self.form == "Table":
            document = {
                "kind": "Table",
                "apiVersion": "meta.k8s.io/v1",
                "metadata": metadata,
                "columnDefinitions": [],
                "rows": [],
            }
        elif self.form:
            document |= {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1"}
        return self._line(Change.BOOKMARK, document)

    def error(self, error: PaddockError) -> bytes:
        """Return the line of the error that ends the watch."""
        return self._line("ERROR", failure_status(error, self.info))

    def _line(self, change: str, document: dict[str, Any]) -> bytes:
        return _encoder.encode({"type": str(change), "object": document}) + b"\n"

    def _shown(self, obj: Resource) -> dict[str, Any]:
        if self.form != "Table":
            return partial(obj) if self.form else render(obj)
        columns, self._has_columns = not self._has_columns, True
        return table(
            self.info,
            (obj,),
            now=self.call.context.clock.now(),
            include=self.include,
            version=obj.metadata.resource_version,
            with_columns=columns,
        )


async def watch(call: KubeCall) -> Response:
    """Stream changes until the client disconnects, the timeout ends or the version is gone."""
    stream = _Stream(call)
    return StreamingResponse(_lines(stream), media_type="application/json")


async def _lines(stream: _Stream) -> AsyncGenerator[bytes]:
    deadline = asyncio.get_running_loop().time() + stream.seconds
    try:
        since = stream.since
        if since in ("", "0") or stream.with_initial:
            page = await _list_current(stream)
            for obj in page.items:
                yield stream.event(Change.ADDED, obj)
            since = page.version
            if stream.with_initial:
                yield stream.bookmark(since, _INITIAL_END)
        async with aclosing(_changes(stream, since, deadline)) as lines:
            async for line in lines:
                yield line
    except PaddockError as error:
        yield stream.error(error)


async def _list_current(stream: _Stream) -> Page[Resource]:
    return await stream.call.store.list(
        stream.info.cls,
        namespace=stream.call.target.namespace,
        labels=stream.labels,
        fields=stream.fields,
    )


async def _changes(stream: _Stream, since: str, deadline: float) -> AsyncGenerator[bytes]:
    loop = asyncio.get_running_loop()
    while loop.time() < deadline:
        events = stream.call.store.watch(
            stream.info.cls,
            since=since,
            namespace=stream.call.target.namespace,
            labels=stream.labels,
            fields=stream.fields,
        )
        async with aclosing(events):
            while True:
                try:
                    # Only around the wait: the timeout must not interrupt a line.
                    async with asyncio.timeout_at(min(deadline, loop.time() + stream.silence)):
                        event = await anext(events)
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    break  # cancelling the wait also ended the store's watch
                since = event.version
                if event.object is not None:
                    yield stream.event(event.change, event.object)
                elif stream.with_bookmarks:
                    yield stream.bookmark(since)
        if stream.with_bookmarks:
            yield stream.bookmark(since)


def _field_selector(call: KubeCall) -> FieldSelector | None:
    """Return the field selector, narrowed to one object if the path names one."""
    selector = field_selector(call)
    if call.target.name is None:
        return selector
    term = FieldTerm(("metadata", "name"), call.target.name)
    return FieldSelector((*(selector.terms if selector else ()), term))
