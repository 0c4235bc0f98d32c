"""Decoding of bodies into objects, checked against the path of the request."""

import base64
from typing import Any, cast

from msgspec import Struct

from paddock.api.kube.context import KubeCall
from paddock.api.kube.requests import field_validation
from paddock.api.kube.status import BadRequestError
from paddock.kit.errors import FieldProblem, InvalidError
from paddock.resources import codec
from paddock.resources.kinds.builtin import Namespace, Secret
from paddock.resources.meta import Resource, with_meta


class Decoded(Struct, frozen=True):
    """A decoded object, and the unknown fields of its body."""

    object: Resource
    unknown: list[FieldProblem]


def decode(call: KubeCall, body: Any) -> Decoded:
    """Decode a body, and check that it matches the path."""
    info, target = call.target.info, call.target
    if not isinstance(body, dict):
        raise BadRequestError("the body must be an object with apiVersion, kind, metadata and spec")
    plain = cast("dict[str, Any]", body)
    for field, wanted in (("apiVersion", info.cls.API_VERSION), ("kind", info.kind)):
        if plain.get(field) not in (None, "", wanted):
            text = f"{str(plain[field])[:80]!r} does not belong here: use {wanted}"
            problem = FieldProblem(field, text)
            raise InvalidError(str(problem), problems=[problem])
    call.request.state.name = _name_in_body(plain)
    plain = _normalize(info.cls, plain)
    unknown = codec.unknown_fields(info.cls, plain)
    if unknown and (policy := field_validation(call.request)) != "Ignore":
        if policy == "Strict":
            fields = ", ".join(f'unknown field "{problem.path}"' for problem in unknown)
            raise BadRequestError(f"strict decoding error: {fields}", problems=unknown)
    else:
        unknown = []
    obj = codec.from_builtins(info.cls, codec.without_nulls(info.cls, plain))
    meta = obj.metadata
    if target.name and meta.name not in ("", target.name):
        raise _bad_field("metadata.name", f"{meta.name[:80]!r} is not the name in the path")
    namespace = target.namespace or ""
    if meta.namespace not in ("", namespace):
        raise _bad_field(
            "metadata.namespace", f"{meta.namespace[:80]!r} is not the namespace in the path"
        )
    named = with_meta(obj, namespace=namespace, name=target.name or meta.name)
    return Decoded(codec.typed(named), unknown)


def _name_in_body(plain: dict[str, Any]) -> str:
    """Return the object's name in a body, even if the rest is invalid."""
    meta = plain.get("metadata")
    fields = cast("dict[str, Any]", meta) if isinstance(meta, dict) else {}
    name = fields.get("name") or fields.get("generateName")
    return name[:253] if isinstance(name, str) else ""


def _normalize(cls: type[Resource], plain: dict[str, Any]) -> dict[str, Any]:
    """Convert fields of Kubernetes' own kinds that exist only on write, such as `stringData`."""
    if cls is Namespace:
        return {name: value for name, value in plain.items() if name != "spec"}
    if cls is Secret and plain.get("type") == "":
        plain = {name: value for name, value in plain.items() if name != "type"}
    if cls is Secret and isinstance(texts := plain.get("stringData"), dict):
        data = plain.get("data")
        coded = {
            name: base64.b64encode(text.encode()).decode() if isinstance(text, str) else text
            for name, text in cast("dict[str, Any]", texts).items()
        }
        merged = {**(cast("dict[str, Any]", data) if isinstance(data, dict) else {}), **coded}
        rest = {name: value for name, value in plain.items() if name != "stringData"}
        return {**rest, "data": merged}
    return plain


def _bad_field(field: str, message: str) -> BadRequestError:
    problem = FieldProblem(field, message)
    return BadRequestError(str(problem), problems=[problem])
