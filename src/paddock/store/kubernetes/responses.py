"""Decoding of API server responses.

An object that cannot be decoded is logged and skipped, so that it does not hide the others.
"""

import logging
from collections.abc import Iterable
from typing import Any, Generic

import msgspec
from msgspec import Raw, Struct

from paddock.kit.errors import InvalidError
from paddock.kit.logs import fields
from paddock.resources import codec
from paddock.resources.meta import Key, ObjectMeta, R, Resource

log = logging.getLogger(__name__)


class ListMeta(Struct, frozen=True, rename="camel", gc=False):
    """The metadata of a list."""

    resource_version: str = ""
    continue_token: str = msgspec.field(name="continue", default="")
    remaining_item_count: int | None = None


class _List(Struct, Generic[R], frozen=True):
    items: tuple[R, ...] | None = None
    metadata: ListMeta = ListMeta()


class _RawList(Struct, frozen=True):
    items: tuple[Raw, ...] | None = None
    metadata: ListMeta = ListMeta()


class RawEvent(Struct, frozen=True):
    """A watch event whose object is still bytes."""

    type: str
    object: Raw


class _Event(Struct, Generic[R], frozen=True):
    type: str
    object: R


_list_decoders: dict[type[Resource], msgspec.json.Decoder[Any]] = {}
_event_decoders: dict[type[Resource], msgspec.json.Decoder[Any]] = {}


def _list_decoder(kind: type[R]) -> msgspec.json.Decoder[_List[R]]:
    if (decoder := _list_decoders.get(kind)) is None:
        decoder = _list_decoders[kind] = msgspec.json.Decoder(_List[kind])
    return decoder


def _event_decoder(kind: type[R]) -> msgspec.json.Decoder[_Event[R]]:
    if (decoder := _event_decoders.get(kind)) is None:
        decoder = _event_decoders[kind] = msgspec.json.Decoder(_Event[kind])
    return decoder


_raw_list_decoder = msgspec.json.Decoder(_RawList)
_raw_event_decoder = msgspec.json.Decoder(RawEvent)


def read_object(kind: type[R], data: bytes) -> R:
    """Decode an object and set its kind and apiVersion, which servers omit in lists."""
    return codec.typed(codec.decode(kind, data))


class _Typed(Struct, frozen=True, rename="camel"):
    kind: str = ""
    api_version: str = ""


_typed_decoder = msgspec.json.Decoder(_Typed)


def is_status(data: bytes) -> bool:
    """Whether a response is a Status and not an object."""
    typed = _typed_decoder.decode(data)
    return typed.kind == "Status" and typed.api_version == "v1"


def read_list(kind: type[R], data: bytes) -> tuple[tuple[R, ...], ListMeta]:
    """Decode a page. Objects that cannot be decoded are logged and skipped."""
    try:
        found = _list_decoder(kind).decode(data)
    except msgspec.ValidationError:
        raw = _raw_list_decoder.decode(data)
        return tuple(_readable(kind, raw.items or ())), raw.metadata
    items = found.items or ()
    if items and not items[0].kind:
        items = tuple(codec.typed(item) for item in items)
    return items, found.metadata


def _readable(kind: type[R], items: Iterable[Raw]) -> Iterable[R]:
    for raw in items:
        try:
            yield read_object(kind, bytes(raw))
        except InvalidError as error:
            log_unreadable(kind, raw, error)


class _Named(Struct, frozen=True):
    metadata: ObjectMeta = ObjectMeta()


_named_decoder = msgspec.json.Decoder(_Named)


def read_meta(data: bytes | memoryview | Raw) -> ObjectMeta:
    """Decode only the metadata of an object."""
    return _named_decoder.decode(data).metadata


def log_unreadable(kind: type[Resource], raw: Raw, error: Exception) -> None:
    """Log that an object cannot be decoded and is skipped."""
    try:
        metadata = read_meta(raw)
    except msgspec.DecodeError:
        metadata = ObjectMeta()
    log.error(
        "object cannot be decoded and is skipped",
        extra=fields(
            kind=kind.KIND,
            object=str(Key(metadata.namespace, metadata.name)),
            cause=str(error),
        ),
    )


def read_event(kind: type[R], line: bytes) -> tuple[str, R]:
    """Decode a watch event with an object of this kind."""
    event = _event_decoder(kind).decode(line)
    return event.type, codec.typed(event.object)


def read_raw_event(line: bytes) -> RawEvent:
    """Decode a watch event of any type, without its object."""
    return _raw_event_decoder.decode(line)
