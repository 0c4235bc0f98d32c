"""Verb and object of a request, from its ASGI scope, for each API. Pure."""

from collections.abc import Callable
from typing import NamedTuple

from msgspec import UNSET, UnsetType
from starlette.types import Scope

from paddock.api.audit.event import E2B_GROUP, MAX_NAME, AuditedObject, visible
from paddock.api.audit.notes import AuditCall, AuditNotes, notes_of
from paddock.api.kube.scheme import ResourceTarget, group_version, parse_path
from paddock.manager.federation.protocol import PREFIX as PEER_PREFIX

READS = frozenset(("GET", "HEAD", "OPTIONS"))
_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete", "GET": "get"}
_MAX_VERB = 16
_PEER_CALLS = {
    f"{PEER_PREFIX}/claims": AuditCall("create", "sandboxes"),
    f"{PEER_PREFIX}/abandon": AuditCall("delete", "sandboxes"),
}
_REVIEWS = ("/apis/authorization.k8s.io/", "/apis/authentication.k8s.io/")
"""Reviews are created, but change nothing."""


class DescribedCall(NamedTuple):
    """What a request asks for."""

    verb: str
    target: AuditedObject | UnsetType
    is_change: bool


Describe = Callable[[Scope], DescribedCall]


def _non_resource(scope: Scope) -> str:
    """Return the verb of a request that is not for a known resource."""
    return visible(scope["method"].lower(), _MAX_VERB)


def describe_e2b(scope: Scope) -> DescribedCall:
    """Describe a call of E2B's API; `route` noted what the path stands for."""
    notes = notes_of(scope)
    method = scope["method"]
    call = notes.call
    if call is None:
        return DescribedCall(_non_resource(scope), UNSET, method not in READS)
    return DescribedCall(call.verb, _e2b_object(scope, call, notes), method not in READS)


def _e2b_object(scope: Scope, call: AuditCall, notes: AuditNotes) -> AuditedObject:
    name = scope.get("path_params", {}).get(call.name) or notes.name
    return AuditedObject(
        resource=call.resource,
        name=visible(name, MAX_NAME),
        api_group=E2B_GROUP,
        subresource=call.subresource,
    )


def describe_kube(scope: Scope) -> DescribedCall:
    """Describe a call of the declarative API."""
    path, method = scope["path"], scope["method"]
    target: ResourceTarget | None = scope.get("state", {}).get("target") or parse_path(path)
    is_change = method not in READS and not path.startswith(_REVIEWS)
    if target is None:
        return DescribedCall(_non_resource(scope), UNSET, is_change)
    group, version = group_version(target.info)
    wanted = AuditedObject(
        resource=target.info.cls.PLURAL,
        namespace=visible(target.namespace or "", MAX_NAME),
        name=visible(target.name or notes_of(scope).name, MAX_NAME),
        api_group=group,
        api_version=version,
        subresource=target.subresource or "",
    )
    return DescribedCall(_kube_verb(scope, target), wanted, is_change)


def _kube_verb(scope: Scope, target: ResourceTarget) -> str:
    method = scope["method"]
    verb = _VERBS.get("GET" if method == "HEAD" else method, _non_resource(scope))
    if verb == "get":
        options = scope.get("query_string", b"")
        if b"watch=true" in options or b"watch=1" in options:
            return "watch"
        return "get" if target.name else "list"
    if verb == "delete" and target.name is None:
        return "deletecollection"
    return verb


def describe_peer(scope: Scope) -> DescribedCall:
    """Describe a message of another cluster. E2B's API records the calls that it forwards."""
    call = _PEER_CALLS.get(scope["path"])
    if call is None:
        return DescribedCall(_non_resource(scope), UNSET, False)
    return DescribedCall(call.verb, _e2b_object(scope, call, notes_of(scope)), True)


def describe_gateway(scope: Scope) -> DescribedCall:
    """Describe a message of a gateway: only refusals are recorded."""
    return DescribedCall(_non_resource(scope), UNSET, False)


def describe_mcp(scope: Scope) -> DescribedCall:
    """Describe a message of an MCP client: only refusals are recorded. What its tools change is
    recorded by the calls that they make."""
    return DescribedCall(_non_resource(scope), UNSET, False)
